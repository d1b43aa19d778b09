"""Long-running processes exempt what exists when they start from garbage collection."""

import gc

from postroom.application.threads import exempt_heap


class Node:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self, freed: list[str], name: str) -> None:
        self.self = self
        self._freed = freed
        self._name = name

    def __del__(self) -> None:
        self._freed.append(self._name)


def test_only_what_was_created_later_is_collected() -> None:
    freed: list[str] = []
    older = Node(freed, "older")
    with exempt_heap():
        del older
        Node(freed, "newer")
        gc.collect()
        assert freed == ["newer"]
    gc.collect()
    assert freed == ["newer", "older"]


def test_what_is_garbage_before_is_collected_first() -> None:
    freed: list[str] = []
    Node(freed, "garbage")
    with exempt_heap():
        assert freed == ["garbage"]
