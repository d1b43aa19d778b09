"""A page for each error code, and their index."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

import postroom
from postroom.adapters.cli.values import exit_code
from postroom.adapters.grpc.calls import status_code
from postroom.adapters.http_server import problems
from postroom.application import extras
from postroom.application.error_reference import ErrorEntry, error_entries
from postroom.domain import errors
from postroom.domain.errors import PostroomError, Rejected
from scripts.reference.tables import code, table

HEAD = """# Errors

The codes of errors, each with its cause, an example and the remedy. `postroom explain CODE` prints the
same, and a server over HTTP has the page of each code at `/v1/errors/CODE`, which is the `type` of its
problem documents (RFC 9457). Codes may be added; the meaning of a code never changes.

Written by `make operations` from `application/error_entries.toml` and the classes of errors.

"""
DOCS = Path(__file__).parents[2] / "docs"
WITHOUT_CLASS: Mapping[str, tuple[int | None, int | None]] = {
    "E_STALE_PREVIEW": (None, None),  # of tools for agents
    "E_TIMEOUT": (408, None),
    "E_HEADER_TOO_LARGE": (431, None),
    "E_USAGE": (None, 2),
    "E_IO": (None, 1),
    "E_DEFECT": (None, 1),
    "E_INTERRUPTED": (None, 130),
}
"""HTTP status and exit code of errors that are no exceptions of Postroom."""
BELOW_SURFACES = (
    "DUPLICATE_MESSAGE",
    "E_CLOCK",
    "E_LEASE_HELD",
    "E_LEASE_LOST",
    "E_OWNED",
    "E_POISON",
    "E_PROJECTION",
    "E_STALE_MEMBERS",
    "E_STORE",
    "FUTURE_EVENT",
    "INVALID_OUTBOX",
    "INVALID_TIMESTAMP",
)
"""Codes with which no call over HTTP is refused."""
REASONS = {"E_CAP_AUTH": "expired", "E_CAP_SCOPE": "operation"}
CORR_ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e02"


def make_error_pages() -> dict[str, str]:
    """Return the pages by name of the file."""
    entries = error_entries()
    rows = (
        (f"[`{name}`]({name}.md)", str(_status(name) or ""), entry.title) for name, entry in entries.items()
    )
    index = HEAD + table(("code", "HTTP status", "meaning"), rows)
    return {"index.md": index} | {f"{name}.md": _page(name, entry) for name, entry in entries.items()}


def error_classes() -> Iterator[type[PostroomError]]:
    """Yield the exceptions that users may meet, the general ones before those derived from them."""
    for module in (errors, extras, problems):
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, PostroomError) and value not in (PostroomError, Rejected):
                yield value


def _classes(name: str) -> list[type[PostroomError]]:
    return [each for each in error_classes() if each.code == name]


def _status(name: str) -> int | None:
    classes = _classes(name)
    return classes[0].status if classes else WITHOUT_CLASS[name][0]


def _page(name: str, entry: ErrorEntry) -> str:
    facts = list(_facts(name))
    parts = [f"# {name}\n\n{entry.title}.\n", *([table(("where", "what"), facts)] if facts else [])]
    parts.append(f"## Cause\n\n{entry.cause}\n\n## Example\n\n```text\n{entry.example}\n```\n")
    if (problem := _problem(name, entry)) is not None:
        parts.append(f"Over HTTP:\n\n```json\n{problem}\n```\n")
    parts.append(f"## Remedy\n\n{entry.remedy}\n")
    if entry.see:
        links = (f"[{_title(each)}](../../{each})" for each in entry.see)
        parts.append(f"See {', '.join(links)}.\n")
    return "\n".join(parts)


def _facts(name: str) -> Iterator[tuple[str, str]]:
    """Yield where an error is met, and as what."""
    classes = _classes(name)
    if classes:
        yield "Python", ", ".join(map(_link, classes))
    if (status := _status(name)) is not None:
        yield "HTTP", str(status)
    made = [each.__new__(each) for each in classes if each.__module__ == errors.__name__]
    if made and name not in BELOW_SURFACES:
        yield "gRPC", code(status_code(made[0]).name)
    exits = {str(exit_code(each)) for each in made} or {str(WITHOUT_CLASS.get(name, (None, None))[1] or "")}
    if exits != {""}:
        yield "exit code of the command line", ", ".join(sorted(exits))


def _title(target: str) -> str:
    """Return the heading that a link leads to; generated pages may not be written yet."""
    path, _, anchor = target.partition("#")
    if path.startswith("reference/"):
        return path.removeprefix("reference/").removesuffix(".md").capitalize()
    headings = re.findall(r"^#+ (.+)$", (DOCS / path).read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-"): each for each in headings}
    return slugs[anchor] if anchor else headings[0]


def _link(error: type[PostroomError]) -> str:
    name = error.__name__
    return f"[`{name}`](../api/errors.md#{name.lower()})" if name in postroom.__all__ else code(name)


def _problem(name: str, entry: ErrorEntry) -> str | None:
    """Return a problem document; None for a code that none has."""
    classes = _classes(name)
    if not classes or name in BELOW_SURFACES:
        return None
    error = classes[0].__new__(classes[0], entry.example)
    error.__dict__ |= {"retry_after_ms": 1_000, "reason": REASONS.get(name, "")}
    document = msgspec.json.encode(problems.problem(error, CORR_ID))
    return msgspec.json.format(document, indent=2).decode()
