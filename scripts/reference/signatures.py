"""Signatures as code, with the values of constants that are defaults."""

import inspect
from typing import Any

import griffe

from scripts.reference.tables import code


def signature_of(name: str, function: Any, value: Any, skip: int) -> str:
    """Return the signature as code, one argument a line if it is long."""
    shown, kind = [], None
    parameters = list(function.parameters)[skip:]
    for each in parameters:
        now = each.kind
        if now is griffe.ParameterKind.keyword_only and kind not in (
            now,
            griffe.ParameterKind.var_positional,
        ):
            shown.append("*")
        if kind is griffe.ParameterKind.positional_only and now is not kind:
            shown.append("/")
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            now, ""
        )
        text = stars + each.name + (f": {each.annotation}" if each.annotation else "")
        default = default_text(each, value)
        shown.append(
            text if default is None else f"{text} = {default}" if each.annotation else f"{text}={default}"
        )
        kind = now
    if kind is griffe.ParameterKind.positional_only:
        shown.append("/")
    start = ("async def " if "async" in function.labels else "def ") + name
    end = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{start}({', '.join(shown)}){end}"
    if len(line) > 90:
        line = "\n    ".join([f"{start}(", *(f"{each}," for each in shown)]) + f"\n){end}"
    return f"```python\n{line}\n```\n"


def default_text(parameter: Any, value: Any) -> str | None:
    """Return a default as code; the value of a constant instead of its name."""
    if parameter.default is None or str(parameter.kind.value).startswith("variadic"):
        return None
    text = str(parameter.default)
    if text.replace("_", "").isalnum() and text[0].isupper() and value is not None:
        try:
            default = inspect.signature(value).parameters[parameter.name].default
        except (KeyError, TypeError, ValueError):
            return text
        if isinstance(default, str | int | float | tuple | bool | None):
            return repr(default)
    return text


def default_of(parameter: Any, value: Any) -> str:
    """Return the cell of a default."""
    if str(parameter.kind.value).startswith("variadic"):
        return ""
    text = default_text(parameter, value)
    return "required" if text is None else code(text)
