"""Values as text on pages."""

from typing import Any


def label_of(value: Any) -> str:
    """Return a value as printable text; other characters, which XML can't contain, become `�`."""
    text = "(none)" if value is None else str(value)
    return "".join(each if each.isprintable() else "�" for each in text)
