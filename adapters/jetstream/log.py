"""The stream of lease events, through the JSON API of JetStream (ADR 0059)."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import msgspec
from eventsourcing.persistence import IntegrityError, OperationalError
from nats.aio.client import Client
from nats.errors import Error as NatsError

from postroom.adapters.jetstream.client import API, ATTEMPT_SECONDS, PAGE_MESSAGES, PAUSE_SECONDS, read_page
from postroom.adapters.jetstream.stream import StreamMessage, decode

_WRONG_LAST_SEQUENCE = (10071, 10164)
_DUPLICATE_IN_BATCH = 10201
_NO_MESSAGE = 10037


class Outgoing(NamedTuple):
    """A message to be published.

    Arguments:
        version: of the event in it.
        expected: sequence of the last message of its subject; None after the first of a save.
    """

    subject: str
    payload: bytes
    version: int
    expected: int | None


class ApiError(Exception):
    """JetStream answered with an error."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"{reason} (NATS error {number})")
        self.number = number


class LeaseLog:
    """The messages of a stream; decisions rest on the answers of its leader.

    Each call ends before its deadline, a time of the event loop, or raises OperationalError.

    Arguments:
        client: a connection to the servers.
        stream: name of the stream.
    """

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream
        self.all_subjects = f"{stream}.*"

    async def append(self, save: UUID, messages: Sequence[Outgoing], deadline: float) -> list[int]:
        """Store messages, all or none, and return their sequences.

        An attempt without an answer is repeated: of all attempts at most one can be stored, as each names the
        last sequence of its subjects. It is known to be stored when the stream has it, and to have failed
        when another message took its place.

        Raises:
            IntegrityError: an aggregate has another event of the version; nothing was stored.
            OperationalError: the outcome is unknown.
        """
        is_first = True
        while True:
            try:
                last = await self._publish(save, messages, deadline)
                return list(range(last - len(messages) + 1, last + 1))
            except ApiError as refused:
                reason = str(refused)
                if refused.number in _WRONG_LAST_SEQUENCE and is_first:
                    raise _conflict(messages[0]) from refused
                if refused.number in (*_WRONG_LAST_SEQUENCE, _DUPLICATE_IN_BATCH):
                    stored = await self._find_attempt(save, messages, deadline)
                    if stored is not None:
                        return stored
            except (NatsError, OSError, TimeoutError) as error:
                reason = _describe(error)
            is_first = False
            await self._pause(
                deadline, f"It is unknown whether stream {self._stream} has stored events", reason
            )

    async def last(self, subject: str, deadline: float, at_least: int = 0) -> StreamMessage | None:
        """Return the last message of a subject, which may have wildcards, or None.

        Arguments:
            at_least: sequence of a message of the subject that was stored before, or 0. An older answer comes
                from a leader that was paused and does not yet know of its successor; it is asked again.
        """
        return await self._get({"last_by_subj": subject}, deadline, at_least)

    async def next(self, subject: str, sequence: int, deadline: float) -> StreamMessage | None:
        """Return the first message of a subject from a sequence on, or None."""
        return await self._get({"seq": sequence, "next_by_subj": subject}, deadline)

    async def read(self, first: int, last: int, limit: int, deadline: float) -> list[StreamMessage]:
        """Return up to `limit` messages from sequence `first` to `last`, which the stream's leader has.

        A replica may answer; one that lags is asked again.
        """
        messages: list[StreamMessage] = []
        while True:
            reason = "a replica lags behind its leader"
            try:
                count = min(limit - len(messages), PAGE_MESSAGES)
                request = {"seq": first, "batch": count, "next_by_subj": self.all_subjects}
                stored = await read_page(self._client, self._stream, request, last, deadline)
                page = [decode(*each) for each in stored]
            except (NatsError, OSError, TimeoutError) as error:
                page, reason = [], _describe(error)
            messages += [each for each in page if each.sequence <= last]
            if len(messages) >= limit or (page and page[-1].sequence >= last):
                return messages
            if page:
                first = page[-1].sequence + 1
            else:
                await self._pause(deadline, f"Stream {self._stream} could not be read", reason)

    # -- requests ---

    async def _publish(self, save: UUID, messages: Sequence[Outgoing], deadline: float) -> int:
        """Publish the messages of a save once, several as an atomic batch; return the last sequence."""
        batch = uuid4().hex
        for index, message in enumerate(messages):
            headers = {"Nats-Msg-Id": f"{save.hex}.{index}", "Nats-Expected-Stream": self._stream}
            if message.expected is not None:
                headers["Nats-Expected-Last-Subject-Sequence"] = str(message.expected)
            if len(messages) > 1:
                headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(index + 1)}
            if index < len(messages) - 1:
                await self._client.publish(message.subject, message.payload, headers=headers)
                continue
            if len(messages) > 1:
                headers["Nats-Batch-Commit"] = "1"
            answer = await self._request(message.subject, message.payload, headers, deadline)
            return int(answer["seq"])
        raise ValueError("there are no messages")

    async def _find_attempt(
        self, save: UUID, messages: Sequence[Outgoing], deadline: float
    ) -> list[int] | None:
        """Return the sequences of the messages of a save, or None while it is unknown if they are stored.

        Raises: IntegrityError when another message took the place of one, OperationalError when so many came
            after it that the stream has removed it.
        """
        for message in messages:
            if message.expected is None:
                continue
            other = await self.next(message.subject, message.expected + 1, deadline)
            if other is None:
                continue  # the leader refused an attempt because of one that it may not yet have stored
            if other.save == save:
                start = other.sequence - other.place
                return list(range(start, start + len(messages)))
            if other.event.originator_version == message.version:
                raise _conflict(message)
            raise OperationalError(
                f"It is unknown whether stream {self._stream} has stored an event at {message.subject}, as "
                "it has removed the oldest events there since; load the aggregate again."
            )
        return None

    async def _get(
        self, request: Mapping[str, Any], deadline: float, at_least: int = 0
    ) -> StreamMessage | None:
        # STREAM.MSG.GET is answered by the stream's leader, DIRECT.GET by any replica.
        body = msgspec.json.encode(request)
        while True:
            try:
                answer = await self._request(f"{API}.STREAM.MSG.GET.{self._stream}", body, None, deadline)
                message = answer["message"]
                data = base64.b64decode(message.get("data") or "")
                if message["seq"] >= at_least:
                    return decode(message["subject"], message["seq"], data)
                reason = f"its leader answers with message {message['seq']}, but {at_least} was stored"
            except ApiError as refused:
                if refused.number == _NO_MESSAGE and not at_least:
                    return None
                reason = str(refused)
            except (NatsError, OSError, TimeoutError) as error:
                reason = _describe(error)
            await self._pause(deadline, f"Stream {self._stream} could not be read", reason)

    async def _request(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, deadline: float
    ) -> dict[str, Any]:
        seconds = min(ATTEMPT_SECONDS, deadline - _now())
        if seconds <= 0:
            raise TimeoutError
        reply = await self._client.request(subject, payload, timeout=seconds, headers=headers)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if error := answer.get("error"):
            raise ApiError(error.get("err_code", 0), error.get("description", "no reason given"))
        return answer

    async def _pause(self, deadline: float, what: str, reason: str) -> None:
        if _now() + PAUSE_SECONDS >= deadline:
            raise OperationalError(
                f"{what}: {reason}. Check that the servers run and that the stream has a leader."
            )
        await asyncio.sleep(PAUSE_SECONDS)


def _conflict(message: Outgoing) -> IntegrityError:
    aggregate = UUID(hex=message.subject.rpartition(".")[2])
    return IntegrityError(
        f"Aggregate {aggregate} already has an event of version {message.version}; load it again and repeat "
        "the command."
    )


def _describe(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
