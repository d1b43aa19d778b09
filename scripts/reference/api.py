"""The reference of the Python API: every name of `postroom.__all__`, from the source without running it.

Signatures and annotations are those of the source, as griffe reads it; defaults that are names of constants
are shown with their values.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import griffe
import msgspec

import postroom
from postroom.application.operations.mailbox import OPERATIONS
from postroom.domain.errors import PostroomError
from scripts.operations import ROOT
from scripts.reference.docstrings import (
    docstring_of,
    meanings_of,
    prose,
    referred,
    term,
    text_of,
    with_plain_head,
)
from scripts.reference.examples import find_example
from scripts.reference.signatures import default_of, signature_of
from scripts.reference.tables import code, table

HEAD = """# Python API

The names of `from postroom import ...`; the guide is [Use a mailbox from Python](../../clients.md). Names
that end in `_ms`, `_us`, `_seconds` and `_bytes` have these units. All calls of a mailbox may raise
`InvalidRequest`, `Saturated` and `Unavailable`; [errors](../errors/index.md) explains each code.

Written by `make operations` from the docstrings and annotations of the source.

"""
PAGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "mailboxes": (
        "Mailboxes",
        (
            "adapters.compose",
            "adapters.compose.connect",
            "adapters.compose.maintenance",
            "adapters.sync_mailbox",
            "application.operations.mailbox",
            "application.mailbox",
            "application.message_stream",
        ),
    ),
    "messages": (
        "Messages",
        (
            "application.messages",
            "application.received_messages",
            "application.page",
            "application.query_results",
            "application.reports",
            "domain.message",
            "domain.envelope",
        ),
    ),
    "queries": (
        "Queries",
        (
            "adapters.compose.queries",
            "adapters.compose.export",
            "application.queries",
            "domain.search",
            "domain.policy_simulation",
        ),
    ),
    "settings": (
        "Settings of a mailbox",
        (
            "application.erasure",
            "domain.policy",
            "domain.redrive",
            "domain.schedule",
            "domain.settings",
            "domain.subject",
            "domain.subscription",
        ),
    ),
    "workers": ("Workers", ("adapters.sentry", "application.workers")),
    "outbox-and-inbox": (
        "Outbox and inbox",
        (
            "adapters.compose.inbox",
            "adapters.compose.outbox",
            "adapters.http",
            "adapters.postgres",
            "adapters.sql.mailbox_outbox",
            "application.inbox",
            "application.outbox",
            "application.ports.inbox",
        ),
    ),
    "brokers": (
        "Brokers and ingestion",
        (
            "adapters.compose.brokers",
            "adapters.compose.ingest",
            "adapters.kafka",
            "adapters.nats",
            "adapters.rabbitmq",
            "application.ports.source",
        ),
    ),
    "read-models": ("Read models and reports", ("adapters.compose.projections", "projections")),
    "errors": ("Errors", ("application.extras", "domain.errors")),
}
"""Title of each page, and the modules, or packages, whose names it has; the longest match counts."""


def make_api_pages() -> dict[str, str]:
    """Return the pages by name of the file."""
    by_page: dict[str, list[str]] = {page: [] for page in PAGES}
    for name in postroom.__all__:
        by_page[page_of(name)].append(name)
    pages = {"index.md": HEAD + _index(by_page)}
    for page, (title, _) in PAGES.items():
        names = sorted(by_page[page], key=_order)
        listed = ", ".join(f"[`{name}`](#{name.lower()})" for name in names)
        head = f"# {title}\n\n{listed}. See also [all names](index.md).\n"
        pages[f"{page}.md"] = head + "".join(map(section, names))
    return pages


def page_of(name: str) -> str:
    """Return the page of a public name."""
    module = postroom._MODULES[name]
    matches = {
        prefix: page
        for page, (_, prefixes) in PAGES.items()
        for prefix in prefixes
        if module == prefix or module.startswith(f"{prefix}.")
    }
    return matches[max(matches, key=len)]


def _order(name: str) -> tuple[bool, str]:
    return name[0].isupper(), name.lower()


def _index(by_page: Mapping[str, Sequence[str]]) -> str:
    rows = [
        (f"[`{name}`]({page_of(name)}.md#{name.lower()})", _first_sentence(name), PAGES[page_of(name)][0])
        for name in sorted(postroom.__all__, key=str.lower)
    ]
    return table(("name", "what it is", "page"), rows)


def _first_sentence(name: str) -> str:
    text = " ".join(docstring_of(find(name)).split("\n\n")[0].split())
    return prose(re.split(r"(?<=[.;:]) ", text)[0].rstrip(";:"))


@cache
def _package() -> Any:
    return griffe.load("postroom", search_paths=[str(ROOT)], resolve_aliases=False)


def find(name: str) -> Any:
    """Return what griffe knows of a public name."""
    return _package()[name].final_target


def section(name: str) -> str:
    """Return the section of a public name."""
    target = find(name)
    value = getattr(postroom, name)
    if target.is_function:
        body = _function(name, target, value)
    elif target.is_class:
        body = _class(name, target, value)
    else:
        body = f"{prose(docstring_of(target))}\n"
    example = find_example(name)
    if example is not None:
        body += f"\nExample:\n\n```python\n{example}\n```\n"
    return f"\n## {name}\n\n{body}"


def _function(name: str, function: Any, value: Any, *, skip: int = 0, base: str = "") -> str:
    """Return signature, text and arguments; what its docstring does not say of these, `base` may."""
    docstring = docstring_of(function)
    text, meanings = text_of(docstring), meanings_of(base) | meanings_of(docstring)
    decorators = {str(each.value).rpartition(".")[2] for each in function.decorators}
    parts = [signature_of(name, function, value, skip), prose(text) + "\n"]
    if "asynccontextmanager" in decorators:
        parts.append("It is an asynchronous context manager: use it with `async with`.\n")
    elif "contextmanager" in decorators:
        parts.append("It is a context manager: use it with `with`.\n")
    parameters = list(function.parameters)[skip:]
    rows = [
        (
            code(each.name),
            code(each.annotation or ""),
            default_of(each, value),
            prose(meanings.get(each.name) or term(each)),
        )
        for each in parameters
    ]
    if rows:
        parts.append(table(("argument", "type", "default", "meaning"), rows))
    return "\n".join(parts) + _see(name, [*(each.annotation for each in parameters), function.returns])


def _class(name: str, cls: Any, value: type) -> str:
    docstring = docstring_of(cls)
    parts = [text_of(docstring) + "\n"]
    constructor = _constructor(value)
    meanings = meanings_of(docstring)
    fields = list(_fields(value))
    if fields:
        rows = [
            (
                code(each.name),
                code(each.annotation),
                _field_default(each, value),
                prose(_meaning(each.name, value) or term(each)),
            )
            for each in fields
        ]
        parts.append(table(("field", "type", "default", "meaning"), rows))
    elif constructor is not None:
        parameters = [each for each in list(constructor.parameters)[1:] if not each.name.startswith("_")]
        if issubclass(value, Exception) or any(each.name in meanings for each in parameters):
            signature = signature_of(name, constructor, value.__init__, 1)
            parts.insert(0, signature.replace("def ", "class ", 1).replace(" -> None", ""))
            rows = [
                (
                    code(each.name),
                    code(each.annotation or ""),
                    default_of(each, value.__init__),
                    prose(meanings.get(each.name) or term(each)),
                )
                for each in parameters
            ]
            parts.append(table(("argument", "type", "default", "meaning"), rows))
    if issubclass(value, PostroomError):
        parts.append(f"Code [`{value.code}`](../errors/{value.code}.md), HTTP status {value.status}.\n")
    shown = "\n".join(parts) + _see(name, [each.annotation for each in fields])
    if name in ("Mailbox", "OwnedMailbox", "SyncMailbox"):
        return f"{shown}\n{_operations()}"
    return shown + "".join(_methods(value))


def _constructor(value: type) -> Any:
    """Return the constructor of a class of Postroom, its own or an inherited one; None without any."""
    for base in value.__mro__:
        if base.__module__.startswith("postroom.") and "__init__" in _of(base).members:
            return _of(base).members["__init__"]
    return None


def _operations() -> str:
    rows = [
        (f"[`{each.name}`](../operations.md#{each.name})", prose(each.summary))
        for each in OPERATIONS.values()
    ]
    return "Its operations:\n\n" + table(("operation", "does"), rows)


def _fields(value: type) -> Iterator[Any]:
    """Yield the fields of a struct, named tuple or dataclass, those of its bases first."""
    if not (
        hasattr(value, "__struct_fields__")
        or hasattr(value, "_fields")
        or hasattr(value, "__dataclass_fields__")
    ):
        return
    seen: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("postroom."):
            for member in _of(base).members.values():
                is_field = (
                    member.is_attribute and member.annotation is not None and "property" not in member.labels
                )
                is_public = not member.name.startswith("_")
                if is_field and is_public and not str(member.annotation).startswith("ClassVar"):
                    seen[member.name] = member
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None) or tuple(seen)
    yield from (seen[name] for name in names if name in seen)


def _of(base: type) -> Any:
    return _package()[f"{base.__module__.removeprefix('postroom.')}.{base.__qualname__}"]


def _field_default(field: Any, value: type) -> str:
    """Return a default as code; the value of a constant instead of its name."""
    if field.value is None:
        return "required"
    defaults = getattr(value, "_field_defaults", {})
    if hasattr(value, "__struct_fields__"):
        defaults = {each.name: each.default for each in msgspec.structs.fields(value)}
    default = defaults.get(field.name)
    return code(repr(default) if type(default) in (int, str) else field.value)


def _meaning(name: str, value: type) -> str:
    """Return what the docstring of a class, of a base, or of a class that it refers to says of a field."""
    for base in value.__mro__:
        if base.__module__.startswith("postroom.") and base.__doc__:
            found = meanings_of(with_plain_head(inspect.cleandoc(base.__doc__))).get(name)
            other = re.match(r"(?:see|as of) `(\w+)`", found or "")
            if other is not None and other[1] in postroom.__all__:
                return _meaning(name, getattr(postroom, other[1])) or str(found)
            if found is not None:
                return found
    return ""


def _methods(value: type) -> Iterator[str]:
    """Yield the sections of the public methods, properties and calls of a class of Postroom."""
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("postroom.") or base.__module__ == "postroom.domain.errors":
            continue
        for name, member in _of(base).members.items():
            is_public = not name.startswith("_") or name == "__call__"
            if name in seen or not is_public or name == "validate":
                continue
            handler = _handler(member)
            if member.is_function or "property" in member.labels or handler is not None:
                seen.add(name)
                yield _method(value, name, handler or member)


def _handler(member: Any) -> Any:
    """Return the call of a handler that the constructor makes, as in `self.get_message = GetMessage(...)`."""
    call = getattr(member, "value", None)
    if "instance-attribute" not in member.labels or not isinstance(call, griffe.ExprCall):
        return None
    path = call.function.canonical_path
    kind = _package()[path.removeprefix("postroom.")] if path.startswith("postroom.") else None
    return kind.members.get("__call__") if kind is not None and kind.is_class else None


def _method(value: type, name: str, member: Any) -> str:
    owner = value.__name__
    title = owner + ("" if name == "__call__" else f".{name}")
    anchor = f"### {title}{'()' if name == '__call__' else ''}"
    if member.is_attribute:
        kind = f"`{member.annotation}`: " if member.annotation is not None else ""
        return f"\n{anchor}\n\nProperty, {kind}{prose(docstring_of(member))}\n"
    docstring = docstring_of(member) or inspect.getdoc(getattr(value, name)) or ""
    member.docstring = griffe.Docstring(docstring, parent=member)
    is_static = "staticmethod" in member.labels
    operation = re.sub(r"(?<!^)(?=[A-Z])", "_", owner).lower() if name == "__call__" else name
    base = inspect.getdoc(OPERATIONS[operation].method) or "" if operation in OPERATIONS else ""
    called = getattr(value, name, None) or getattr(_runtime(member.parent.path), member.name)
    shown = _function(operation, member, called, skip=0 if is_static else 1, base=base + referred(docstring))
    return f"\n{anchor}\n\n{shown}"


def _runtime(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _see(name: str, annotations: Sequence[Any]) -> str:
    """Return links to the public names in annotations."""
    paths = {
        each.canonical_path
        for annotation in annotations
        if isinstance(annotation, griffe.Expr)
        for each in annotation.iterate(flat=True)
        if isinstance(each, griffe.ExprName)
    }
    names = [each for each in postroom.__all__ if each != name and find(each).path in paths]
    links = [f"[`{each}`]({page_of(each)}.md#{each.lower()})" for each in names]
    return f"\nSee {', '.join(links)}.\n" if links else ""
