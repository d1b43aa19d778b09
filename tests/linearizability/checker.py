"""A checker of linearizability: is there one order of all operations that explains what each was answered?

The algorithm is that of Wing and Gong as improved by Lowe: a depth-first search over the operations that may
come next, which remembers every pair of operations done and state reached. An operation may come next if no
other one that is not yet done had ended before it began. Operations of different objects do not disturb each
other, so a history is checked object by object, with a model of one.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from tests.linearizability.history import Operation

State = Hashable
Step = Callable[[Any, Operation], Iterable[Any]]
"""Return the states that an operation may lead to, given what it was answered; none if it can't be.

Several states are possible when something happens that no operation tells of, such as the end of a lease. Of
an operation with an unknown outcome, the states after it took effect are asked for.
"""


class Model(NamedTuple):
    """What an object promises.

    Arguments:
        initial: its state before the first operation.
    """

    name: str
    initial: State
    step: Step


class NotLinearizable(AssertionError):
    """A history that no order of its operations explains.

    Arguments:
        model: the promise that is broken.
        order: the longest order that was possible, from the first operation.
        states: those in which the object may be after it.
        rest: the operations one of which should come next.
    """

    def __init__(
        self, model: str, order: Sequence[Operation], states: Iterable[State], rest: Sequence[Operation]
    ) -> None:
        self.order, self.rest = list(order), list(rest)
        lines = [f"No order of the operations explains their answers as those of {model}."]
        lines += ["The longest order that is possible ends with:", *(f"  {each}" for each in order[-10:])]
        lines += [f"after which the state is {' or '.join(map(str, states))}, and none of these can follow:"]
        lines += [f"  {each}" for each in rest[:10]]
        super().__init__("\n".join(lines))


class _Node:
    """The beginning or the end of an operation, in a doubly linked list by time."""

    __slots__ = ("end", "index", "next", "operation", "previous")

    def __init__(self, operation: Operation, index: int) -> None:
        self.operation = operation
        self.index = index
        self.end: _Node | None = None
        """Of a beginning: the end, unless the outcome is unknown."""
        self.next: _Node | None = None
        self.previous: _Node | None = None


class _Done(NamedTuple):
    node: _Node
    states: frozenset[State]


def check(model: Model, history: Iterable[Operation]) -> int:
    """Check the history of one object, and return the number of states that were visited.

    Raises: NotLinearizable.
    """
    operations = list(history)
    head, remaining = _link(operations), sum(each.end is not None for each in operations)
    states: frozenset[State] = frozenset([model.initial])
    done, stack = 0, list[_Done]()
    visited: set[tuple[int, frozenset[State]]] = {(0, states)}
    longest: tuple[list[Operation], frozenset[State], int] = [], states, 0
    node = head.next
    while remaining:
        if node is None or node.end is node:  # an end: what came before can't be put off any longer
            if not stack:
                order, reached, bits = longest
                rest = [each for number, each in enumerate(operations) if not bits >> number & 1]
                raise NotLinearizable(model.name, order, reached, _candidates(rest))
            undone = stack.pop()
            _unlift(undone.node)
            remaining += undone.node.end is not None
            done &= ~(1 << undone.node.index)
            states, node = undone.states, undone.node.next
            continue
        after = frozenset(next_ for state in states for next_ in model.step(state, node.operation))
        mark = done | 1 << node.index, after
        is_idle = node.end is None and after == states  # it need not have taken effect at all
        if after and not is_idle and mark not in visited:
            visited.add(mark)
            stack.append(_Done(node, states))
            done, states = mark
            _lift(node)
            remaining -= node.end is not None
            if len(stack) > len(longest[0]):
                longest = [each.node.operation for each in stack], states, done
            node = head.next
        else:
            node = node.next
    return len(visited)


def check_each(model: Callable[[Any], Model], histories: dict[Any, list[Operation]]) -> int:
    """Check the history of each object with the model of that object; return the number of operations."""
    for key, history in histories.items():
        check(model(key), history)
    return sum(map(len, histories.values()))


def _candidates(rest: Sequence[Operation]) -> list[Operation]:
    """Return the operations that began before any of them had ended."""
    first = min((each.end for each in rest if each.end is not None), default=0)
    return sorted((each for each in rest if each.call <= first), key=lambda each: each.call)


def _link(operations: Sequence[Operation]) -> _Node:
    """Return a node before the list of beginnings and ends by time; at one time, beginnings come first."""
    nodes: list[tuple[int, bool, _Node]] = []
    for index, operation in enumerate(operations):
        beginning = _Node(operation, index)
        nodes.append((operation.call, False, beginning))
        if operation.end is not None:
            end = beginning.end = _Node(operation, index)
            end.end = end
            nodes.append((operation.end, True, end))
    head = previous = _Node(Operation("", 0, 0, "", None), -1)
    for _, _, node in sorted(nodes, key=lambda each: each[:2]):
        previous.next, node.previous = node, previous
        previous = node
    return head


def _lift(node: _Node) -> None:
    """Take an operation out of the list."""
    for each in (node, node.end):
        if each is not None and each.previous is not None:
            each.previous.next = each.next
            if each.next is not None:
                each.next.previous = each.previous


def _unlift(node: _Node) -> None:
    """Put an operation back into the list, in the reverse order of taking it out."""
    for each in (node.end, node):
        if each is not None and each.previous is not None:
            each.previous.next = each
            if each.next is not None:
                each.next.previous = each
