"""The ordered stream port over a durable pull consumer of JetStream.

Workers share the deliveries of a consumer, so each worker receives a part of the messages, and a paused
worker may hold some. Messages missing between two deliveries are read from the stream by their sequence.
"""

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from postroom.adapters.nats.source import JetStreamSource, LazyHeaders
from postroom.application.ports.source import SourceMessage, StreamState
from postroom.application.telemetry import summarize
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

_TIMEOUT_SECONDS = 5.0
_ABSENT = 404


class JetStreamOrderedStream:
    """A durable pull consumer of a stream, read without gaps.

    Arguments:
        source: the consumer, without prefetch.
    """

    def __init__(self, source: JetStreamSource, stream: str, durable: str) -> None:
        self._source = source
        self._stream = stream
        self._durable = durable
        self._subjects: Sequence[str] = (">",)
        self._ahead: dict[int, SourceMessage] = {}
        self._last: SourceMessage | None = None
        self._incarnation: str | None = None

    async def state(self) -> StreamState:
        """Return the state of the consumer; see `OrderedStream.state`.

        Raises: InvalidRequest for a consumer that passes over messages of the stream.
        """
        state = await self._look()
        if state.incarnation != self._incarnation:
            self._incarnation, self._last = state.incarnation, None
            self._ahead.clear()
        return state

    async def _look(self) -> StreamState:
        stream = await self._ask(f"STREAM.INFO.{self._stream}", {})
        consumer = await self._ask(f"CONSUMER.INFO.{self._stream}.{self._durable}", {})
        if stream is None or consumer is None:
            raise NotFound(
                f"This NATS server has no consumer {self._durable} of stream {self._stream}; define it in "
                "the settings file and run postroom streams apply."
            )
        config = consumer["config"]
        if config.get("deliver_policy") == "last_per_subject":
            raise InvalidRequest(
                f"Consumer {self._durable} of stream {self._stream} delivers only the last message of each "
                "subject, so it can't be read in order; define it with another deliver policy."
            )
        self._subjects = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        return StreamState(
            f"{stream['created']} {consumer['created']}",
            consumer["ack_floor"]["stream_seq"],
            consumer["delivered"]["stream_seq"],
        )

    async def read(self, after: int, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return the next messages after a sequence, without gaps; see `OrderedStream.read`.

        Raises: Unavailable if the stream or consumer was recreated, until `state` is called.
        """
        if not self._ahead:
            fetched = await self._source.fetch(limit, wait_ms)
            self._ahead = {int(message.sequence): message for message in fetched}
        # If nothing was delivered, a look into the stream shows whether other workers have the next messages.
        is_idle = not self._ahead
        if any(at <= after for at in self._ahead):
            # Sequences begin again in a new stream, whose messages must not be taken for old ones.
            if (await self._look()).incarnation != self._incarnation:
                raise self._unavailable("it or its consumer was recreated")
            await self._source.ack([self._ahead.pop(at) for at in list(self._ahead) if at <= after])
        messages: list[SourceMessage] = []
        last = self._last if self._last is not None and int(self._last.sequence) == after else None
        while len(messages) < limit and (self._ahead or is_idle):
            message = await self._next(after, last)
            if message is None:
                break
            messages.append(message)
            after, last = int(message.sequence), message
        self._last = last
        return messages

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Acknowledge messages that are stored; see `OrderedStream.ack`."""
        await self._source.ack([message for message in messages if message.token is not None])

    async def close(self) -> None:
        """Disconnect; see `OrderedStream.close`."""
        await self._source.close()

    async def _next(self, after: int, last: SourceMessage | None) -> SourceMessage | None:
        """Return the message after a sequence; `last` is the message at that sequence, if known."""
        ahead = min(self._ahead, default=None)
        if ahead is not None and (ahead == after + 1 or _follows(last, self._ahead[ahead])):
            return self._ahead.pop(ahead)
        stored = [await self._stored(after + 1, subject) for subject in self._subjects]
        first = min(filter(None, stored), key=lambda each: int(each.sequence), default=None)
        if ahead is not None and (first is None or ahead <= int(first.sequence)):
            return self._ahead.pop(ahead)
        return first

    async def _stored(self, sequence: int, subject: str) -> SourceMessage | None:
        """Return the first message of a subject from a sequence on; it needs no settlement."""
        reply = await self._ask(f"STREAM.MSG.GET.{self._stream}", {"seq": sequence, "next_by_subj": subject})
        if reply is None:
            return None
        stored = reply["message"]
        headers = LazyHeaders(b64decode(stored["hdrs"])) if stored.get("hdrs") else {}
        data = b64decode(stored.get("data", ""))
        return SourceMessage(stored["subject"], data, headers, 1, str(stored["seq"]), None)

    async def _ask(self, where: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return JetStream's reply, or None if what was requested does not exist."""
        body = msgspec.json.encode(request) if request else b""
        try:
            client = self._source.client
            message = await client.request(f"$JS.API.{where}", body, timeout=_TIMEOUT_SECONDS)
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable(summarize(error)) from error
        reply: dict[str, Any] = msgspec.json.decode(message.data)
        error_ = reply.get("error")
        if error_ is None:
            return reply
        if error_.get("code") == _ABSENT:
            return None
        raise self._unavailable(error_.get("description", "no reason was stated"))

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"Stream {self._stream} can't be read: {why}. It is retried when NATS is available."
        )


def _follows(last: SourceMessage | None, message: SourceMessage) -> bool:
    """Return whether two messages are first deliveries of a consumer, one right after the other."""
    if last is None or last.token is None or not last.delivered == message.delivered == 1:
        return False
    return _delivery(message) == _delivery(last) + 1


def _delivery(message: SourceMessage) -> int:
    """Return the number of a delivery among all of its consumer."""
    words = message.token.split(b".")
    return int(words[6 if len(words) == 9 else 8])
