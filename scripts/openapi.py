"""Write the contract of the HTTP interface to docs/reference/openapi.json, or check the copy there.

scripts/openapi.py           writes the copy; refuses changes that break clients
scripts/openapi.py --break   writes it all the same: for a new major version of the contract
scripts/openapi.py --check   fails when the copy is stale, or when the code breaks clients of the copy
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.openapi import make_document
from postroom.adapters.http_server.queries import QueryHandlers, StateHandlers

COPY = Path(__file__).parents[1] / "docs" / "reference" / "openapi.json"
Schema = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    # The document has the names of the handlers only, so their classes do.
    routes = make_routes(MessageHandlers, QueryHandlers, StateHandlers)  # type: ignore[arg-type]
    text = json.dumps(make_document(routes), indent=1, sort_keys=True) + "\n"
    saved = COPY.read_text() if COPY.exists() else text
    changes = list(breaking_changes(json.loads(saved), json.loads(text)))
    if changes and "--break" not in arguments:
        print("The HTTP interface no longer fits docs/reference/openapi.json:", *changes, sep="\n  ")
        return 1
    if "--check" not in arguments:
        COPY.parent.mkdir(exist_ok=True)
        COPY.write_text(text)
    elif saved != text or not COPY.exists():
        print("docs/reference/openapi.json is stale; run `make openapi`.")
        return 1
    return 0


def breaking_changes(old: Schema, new: Schema) -> Iterator[str]:
    """Yield what a client of the old document would miss in the new one."""
    for path, operations in old["paths"].items():
        for method, before in operations.items():
            call = f"{method.upper()} {path}"
            after = new["paths"].get(path, {}).get(method)
            if after is None:
                yield f"{call} is gone"
                continue
            yield from _parameters(call, before, after, old, new)
            yield from _bodies(call, before, after, old, new)
            yield from _answers(call, before, after, old, new)


def _parameters(call: str, before: Schema, after: Schema, old: Schema, new: Schema) -> Iterator[str]:
    had = {(each["in"], each["name"]): each for each in before["parameters"]}
    has = {(each["in"], each["name"]): each for each in after["parameters"]}
    for (_, name), parameter in ((key, has[key]) for key in has.keys() - had.keys()):
        if parameter["required"]:
            yield f"{call}: parameter {name} is required"
    for key, parameter in had.items():
        if key not in has:
            yield f"{call}: parameter {key[1]} is gone"
            continue
        if has[key]["required"] and not parameter["required"]:
            yield f"{call}: parameter {key[1]} is required"
        where = f"{call}: parameter {key[1]}"
        yield from excess(parameter["schema"], has[key]["schema"], old, new, where)


def _bodies(call: str, before: Schema, after: Schema, old: Schema, new: Schema) -> Iterator[str]:
    had, has = before.get("requestBody"), after.get("requestBody")
    if has is not None and has["required"] and not (had and had["required"]):
        yield f"{call}: the body is required"
    if had is None:
        return
    if has is None:
        yield f"{call}: the body is gone"
        return
    shapes = [each["content"]["application/json"]["schema"] for each in (had, has)]
    yield from excess(*shapes, old, new, f"{call}: body")


def _answers(call: str, before: Schema, after: Schema, old: Schema, new: Schema) -> Iterator[str]:
    had, has = before["responses"]["200"]["content"], after["responses"]["200"]["content"]
    for media, content in had.items():
        if media not in has:
            yield f"{call}: the answer is no longer {media}"
        else:
            where = f"{call}: answer"
            yield from excess(has[media]["schema"], content["schema"], new, old, where, is_answer=True)


def excess(
    narrow: Schema, wide: Schema, narrow_in: Schema, wide_in: Schema, where: str, *, is_answer: bool = False
) -> list[str]:
    """Return what is valid by the schema `narrow`, and not by `wide`.

    Arguments:
        narrow_in, wide_in: the documents that their references lead into.
        is_answer: a reader may rely on all properties of `wide`, and ignores others.
    """
    narrow, wide = _resolve(narrow, narrow_in), _resolve(wide, wide_in)

    def inner(a: Schema, b: Schema, name: str) -> list[str]:
        return excess(a, b, narrow_in, wide_in, f"{where}.{name}", is_answer=is_answer)

    if "anyOf" in narrow:
        choices = [
            excess(each, wide, narrow_in, wide_in, where, is_answer=is_answer) for each in narrow["anyOf"]
        ]
        return [each for choice in choices for each in choice]
    if "anyOf" in wide:
        choices = [
            excess(narrow, each, narrow_in, wide_in, where, is_answer=is_answer) for each in wide["anyOf"]
        ]
        return min(choices, key=len)
    if "type" in wide and narrow.get("type") not in (wide["type"], {"number": "integer"}.get(wide["type"])):
        return [f"{where} is of type {narrow.get('type')} there and {wide['type']} here"]
    problems = [
        f"{where} has another {each}" for each in ("pattern", "format") if _differs(each, narrow, wide)
    ]
    problems += [
        f"{where} is bounded by {each} {wide[each]}" for each in wide if _is_tighter(each, narrow, wide)
    ]
    if "enum" in wide and not {*narrow.get("enum", [None])} <= {*wide["enum"]}:
        problems.append(f"{where} has other values than {wide['enum']}")
    had, has = narrow.get("properties", {}), wide.get("properties", {})
    must = {*has} if is_answer else {*wide.get("required", ())}
    offers = {*had} if is_answer else {*narrow.get("required", ())}
    problems += [f"{where}.{name} is missing" for name in sorted(must - offers)]
    if wide.get("additionalProperties") is False and not is_answer:
        problems += [f"{where}.{name} is unknown" for name in sorted(had.keys() - has.keys())]
    for name in had.keys() & has.keys():
        problems += inner(had[name], has[name], name)
    for name in ("items", "additionalProperties"):
        if isinstance(narrow.get(name), dict) and isinstance(wide.get(name), dict):
            problems += inner(narrow[name], wide[name], name)
    return problems


def _resolve(schema: Schema, document: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    resolved: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return resolved


def _differs(name: str, narrow: Schema, wide: Schema) -> bool:
    return name in wide and narrow.get(name) != wide[name]


def _is_tighter(name: str, narrow: Schema, wide: Schema) -> bool:
    if name.startswith("min"):
        return name not in narrow or bool(narrow[name] < wide[name])
    return name.startswith("max") and (name not in narrow or bool(narrow[name] > wide[name]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
