"""`FindMessageIds`: the message ids that begin with a few characters, as people type them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.message_records import MAX_SAME_IDS
from postroom.domain.message import MessageSent
from postroom.domain.names import STREAM_BYTES, message_id, topic_streams

MIN_PREFIX_DIGITS = 4
_PREFIX = re.compile(r"[0-9a-f]{1,8}(-[0-9a-f]{0,4}){0,3}(-[0-9a-f]{0,12})?\Z")
_DASHES = (8, 13, 18, 23)


class MessageCandidate(NamedTuple):
    """A message whose id begins with a prefix."""

    message_id: str
    topic: str
    sent_at: str


class FindMessageIds:
    """A query for the messages whose UUID begins with a prefix; other ids must be named in full."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def __call__(self, prefix: str, limit: int) -> list[MessageCandidate]:
        """Return up to `limit` messages, in the order of their ids.

        Arguments:
            prefix: at least four hexadecimal digits, with the dashes of a UUID; others match nothing.
        """
        digits = prefix.replace("-", "")
        if not is_prefix(prefix) or len(digits) < MIN_PREFIX_DIGITS:
            return []
        first = bytes.fromhex(digits.ljust(2 * STREAM_BYTES, "0"))
        last = bytes.fromhex(digits.ljust(2 * STREAM_BYTES, "f"))
        candidates = list(self._candidates(prefix, self._log.streams_between(first, last, limit)))
        if len(digits) > STREAM_BYTES:  # an id of a topic and its stream have only the first half in common
            others = self._log.streams_between(*topic_streams(first), MAX_SAME_IDS)
            candidates += self._candidates(prefix, others)
        return sorted(set(candidates))[:limit]

    def _candidates(self, prefix: str, streams: Sequence[bytes]) -> Iterator[MessageCandidate]:
        for sent in self._log.replay_first(streams):
            if isinstance(sent, MessageSent):
                id_ = message_id(sent.stream, sent.headers.message_id)
                if id_.startswith(prefix):
                    yield MessageCandidate(id_, sent.topic, rfc3339(sent.at) or "")


def is_prefix(text: str) -> bool:
    """Return whether a text is the beginning of a UUID as it is printed."""
    return bool(_PREFIX.match(text)) and all(
        (character == "-") == (index in _DASHES) for index, character in enumerate(text)
    )
