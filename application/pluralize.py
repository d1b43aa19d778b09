"""Counts in messages for people."""


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, as in `1 event` or `2,000 events`.

    Arguments:
        plural: plural of `noun`; None adds an `s`.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
