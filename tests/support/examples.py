"""How many examples of Hypothesis a test tries."""

from hypothesis import settings

DEFAULT_EXAMPLES = 100


def examples(count: int) -> int:
    """Return how many examples a test tries under the profile of this run.

    Arguments:
        count: examples under the default profile and larger ones.
    """
    return max(1, min(count, count * settings().max_examples // DEFAULT_EXAMPLES))
