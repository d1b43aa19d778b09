"""Values as text on pages."""

from typing import Any


def label_of(value: Any) -> str:
    """Return a value as text that XML can have: other characters become `�`."""
    text = "(none)" if value is None else str(value)
    return "".join(each if each.isprintable() else "�" for each in text)
