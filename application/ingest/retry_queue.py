"""Messages whose storage failed, in the order in which they are stored."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from postroom.application.ports.source import SourceMessage

_Key = tuple[str, bytes]


class RetryQueue:
    """Messages whose storage failed, in their order; one that is redelivered keeps its place.

    A message may be stored before earlier ones, but not before those of its sticky key.
    """

    def __init__(self) -> None:
        self._messages: dict[_Key, SourceMessage] = {}
        self._failures: dict[_Key, tuple[int, int]] = {}
        self._first_trial = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[SourceMessage]:
        return iter(self._messages.values())

    def add(self, messages: Iterable[SourceMessage]) -> None:
        """Add messages at the end."""
        for message in messages:
            self._messages[_key(message)] = message

    def remove(self, messages: Iterable[SourceMessage]) -> None:
        """Remove messages that need no retry."""
        for message in messages:
            self._messages.pop(_key(message), None)
            self._failures.pop(_key(message), None)

    def first(self, limit: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages from the beginning."""
        return list(islice(self._messages.values(), limit))

    def sticky_keys(self) -> set[str]:
        """Return the sticky keys whose later messages must wait."""
        return {each.sticky_key for each in self._messages.values() if each.sticky_key is not None}

    def heads(self) -> Sequence[SourceMessage]:
        """Return the messages that may be stored on their own: the first of each sticky key.

        The next call begins with the messages that `note_trials` did not count.
        """
        keys: set[str] = set()
        heads = []
        for message in self._messages.values():
            if message.sticky_key is None:
                heads.append(message)
            elif message.sticky_key not in keys:
                keys.add(message.sticky_key)
                heads.append(message)
        start = self._first_trial % len(heads) if heads else 0
        return heads[start:] + heads[:start]

    def note_trials(self, count: int, *, has_success: bool) -> None:
        """Note how many of the heads were tried in vain, so that the others are tried first the next time."""
        self._first_trial = 0 if has_success else self._first_trial + count

    def count_failure(self, message: SourceMessage, stored: int) -> int:
        """Count a failure of a single message if others were stored since the last one; return the count.

        Arguments:
            stored: number of messages stored so far.
        """
        failures, stored_before = self._failures.get(_key(message), (0, -1))
        if stored > stored_before:
            failures += 1
            self._failures[_key(message)] = (failures, stored)
        return failures


def _key(message: SourceMessage) -> _Key:
    """Identify a message; a topic that was created again has the same sequences."""
    return message.sequence, message.data
