"""Query parameters: strict, as bodies are."""

import re
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from postroom.adapters.http_server.strict_json import describe
from postroom.domain.errors import InvalidRequest

MAX_PARAMETERS = 1_000
_DEEP = re.compile(r"(\w+)\[([^\[\]]+)\]\Z")


def parse_query(query: bytes, kind: Any) -> Any:
    """Return the query string as a struct.

    Lists are repeated parameters, and mappings have the form `name[key]=value`.

    Arguments:
        kind: the struct; None if the route takes no parameters.

    Raises: InvalidRequest naming the parameter that is unknown, repeated, of a wrong type or out of range.
    """
    if kind is None and not query:
        return None
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except ValueError:
        raise InvalidRequest("The query string is malformed; write name=value&name=value.") from None
    if kind is None:
        if pairs:
            raise InvalidRequest(f"Unknown parameter {pairs[0][0][:80]!r}; this call takes none.")
        return None
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        if "\0" in name + value:
            raise InvalidRequest(f"Parameter {name[:80]!r} contains a NUL character.")
        deep = _DEEP.match(name)
        if deep and isinstance(_default(fields.get(deep[1])), dict):
            target = values.setdefault(deep[1], {})
            if deep[2] in target:
                raise InvalidRequest(f"Parameter {name[:80]!r} occurs twice.")
            target[deep[2]] = value
        elif name not in fields or isinstance(_default(fields[name]), dict):
            raise InvalidRequest(f"Unknown parameter {name[:80]!r}; known are {', '.join(fields)}.")
        elif isinstance(_default(fields[name]), list):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidRequest(f"Parameter {name[:80]!r} occurs twice.")
        else:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"A parameter is invalid: {describe(error)}.") from None


def _default(field: Any) -> Any:
    """Return the default of a field: a new list or mapping if it may occur several times."""
    if field is None or field.default_factory is msgspec.NODEFAULT:
        return None
    return field.default_factory()
