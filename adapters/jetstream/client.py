"""Requests about the messages of a stream, each with a deadline (ADR 0147)."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from nats.errors import Error as NatsError

from postroom.adapters.nats.api import (
    API,
    ATTEMPT_SECONDS,
    NO_HEADERS,
    STREAM_NOT_FOUND,
    ApiError,
    JetStreamApi,
)
from postroom.adapters.nats.client import SupervisedClient
from postroom.domain.errors import Unavailable

FIRST_ATTEMPTS_SECONDS = 0.3, 0.6
"""Seconds of the first requests to the API, which a stream without a leader does not answer."""
PAUSE_SECONDS = 0.05
PAGE_MESSAGES, PAGE_BYTES = 500, 8 << 20
"""Bounds of the messages that one request reads."""
MAX_BATCH = 1_000
"""The most messages that NATS takes in an atomic batch."""
HEADER_BYTES = 512
"""Upper bound of the headers of a message."""
_NO_MESSAGE = (10037, 10043)
_WRONG_LAST_SEQUENCE = (10071, 10164)


class StoredMessage(NamedTuple):
    """A message of a stream."""

    subject: str
    sequence: int
    data: bytes


class Outgoing(NamedTuple):
    """A message to be appended.

    Arguments:
        expected: sequence of the last message of its subject, or 0; None for any, and after the first message
            of a subject in an append.
    """

    subject: str
    data: bytes
    expected: int | None = None


class SubjectChanged(Exception):
    """Messages were not stored, as the last message of a subject is not the expected one.

    Arguments:
        refused: the message that names the expected one.
        other: the message after the expected one, if an attempt before had no answer; else None. That attempt
            may have been stored if the stream has removed messages of the subject since.
    """

    def __init__(self, refused: Outgoing, other: StoredMessage | None) -> None:
        super().__init__(f"Subject {refused.subject} has another last message than {refused.expected}.")
        self.refused = refused
        self.other = other


class StreamMissing(Exception):
    """There is no such stream."""


class StreamClient:
    """Messages of a stream, read from and written by its leader.

    Each call ends before its deadline, a time of the event loop, or raises Unavailable; StreamMissing when
    there is no such stream.

    Arguments:
        client: a connection to the servers.
        is_atomic: whether the stream takes atomic batches.
    """

    def __init__(self, client: SupervisedClient, stream: str, *, is_atomic: bool) -> None:
        self._client = client
        self._api = JetStreamApi(client)
        self.stream = stream
        self.is_atomic = is_atomic

    @property
    def max_bytes(self) -> int:
        """Return the size of the largest message that the server takes."""
        return int(self._client.max_payload) - HEADER_BYTES

    async def append(
        self, subject: str, parts: Sequence[bytes], expected: int | None, deadline: float
    ) -> int:
        """Store messages of one subject in their order, and return the sequence of the last one.

        Arguments:
            parts: several are an atomic batch; a stream without those has them all, or a beginning of them.
            expected: sequence of the last message of the subject, or 0; None for any.

        Raises: as `append_all`.
        """
        if len(parts) > 1 and not (self.is_atomic and len(parts) <= MAX_BATCH):
            for part in parts:
                expected = await self.append(subject, [part], expected, deadline)
            return expected or 0
        messages = [Outgoing(subject, part) for part in parts]
        messages[0] = messages[0]._replace(expected=expected)
        return await self.append_all(messages, deadline)

    async def append_all(self, messages: Sequence[Outgoing], deadline: float) -> int:
        """Store messages, all or none, with adjacent sequences, and return the last of these.

        An attempt without an answer is repeated: of all attempts at most one can be stored, as each names the
        last sequences of the subjects. It is believed to be stored when the stream has it.

        Arguments:
            messages: one, or up to `MAX_BATCH` of a stream with atomic batches.

        Raises: SubjectChanged when a subject has another last message, Unavailable when it is unknown whether
            they are stored.
        """
        what = f"It is unknown whether stream {self.stream} has stored messages"
        is_first = True
        while True:
            try:
                return await self._publish(messages, deadline)
            except ApiError as refused:
                reason: Exception = refused
                if refused.number in _WRONG_LAST_SEQUENCE:
                    stored = await self._find_attempt(messages, deadline, is_first=is_first)
                    if stored is not None:
                        return stored
                elif refused.is_final:
                    raise Unavailable(f"Stream {self.stream} refuses a message: {refused}.") from refused
            except (NatsError, OSError, TimeoutError) as error:
                reason = error
            is_first = False
            await self._pause(deadline, what, reason)

    async def last(self, subject: str, deadline: float, at_least: int = 0) -> StoredMessage | None:
        """Return the last message of a subject, which may have wildcards, or None.

        Arguments:
            at_least: sequence of a message of the subject that was stored before, or 0. An older answer comes
                from a leader that was paused and does not yet know of its successor; it is asked again.
        """
        while True:
            message = await self._get({"last_by_subj": subject}, deadline)
            sequence = 0 if message is None else message.sequence
            if sequence >= at_least:
                return message
            reason = f"its leader answers with message {sequence}, but {at_least} was stored"
            await self._pause(deadline, f"Stream {self.stream} could not be read", TimeoutError(reason))

    async def next(self, subject: str, sequence: int, deadline: float) -> StoredMessage | None:
        """Return the first message of a subject from a sequence on, or None."""
        return await self._get({"seq": max(sequence, 1), "next_by_subj": subject}, deadline)

    async def find(self, subject: str, sequence: int, deadline: float) -> StoredMessage | None:
        """Do as `next` for messages that never change; any replica may answer."""
        body = msgspec.json.encode({"seq": max(sequence, 1), "next_by_subj": subject})
        where = f"{API}.DIRECT.GET.{self.stream}".encode()
        with suppress(NatsError, OSError, TimeoutError):
            seconds = max(min(ATTEMPT_SECONDS, deadline - _now()), 0.001)
            reply = await self._client.request_bytes(where, NO_HEADERS, body, seconds)
            headers = _headers(reply.headers)
            if "Nats-Sequence" in headers:
                return StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), reply.data)
        return await self.next(subject, sequence, deadline)  # a replica may lag

    async def at(self, sequence: int, deadline: float) -> StoredMessage | None:
        """Return the message with a sequence, or None."""
        return await self._get({"seq": sequence}, deadline)

    async def read(
        self, subject: str, first: int, last: int, deadline: float, limit: int = PAGE_MESSAGES
    ) -> list[StoredMessage]:
        """Return the first messages of a subject from sequence `first` on; the leader has message `last`.

        A replica may answer, and messages may be lost on the way: the caller checks that none is missing.

        Returns: at least one, and at most `limit`.
        """
        request = {
            "seq": first,
            "batch": min(limit, PAGE_MESSAGES),
            "max_bytes": PAGE_BYTES,
            "next_by_subj": subject,
        }
        while True:
            reason: Exception = TimeoutError("a replica lags behind its leader")
            try:
                if page := await self._read_page(request, last, deadline):
                    return page
            except (NatsError, OSError, TimeoutError) as error:
                reason = error
            await self._pause(deadline, f"Stream {self.stream} could not be read", reason)

    async def subjects(self, pattern: str, deadline: float) -> list[str]:
        """Return the subjects with messages that match a pattern."""
        subjects: list[str] = []
        while True:
            request = {"subjects_filter": pattern, "offset": len(subjects)}
            info = await self._ask(f"STREAM.INFO.{self.stream}", request, deadline)
            page = info["state"].get("subjects") or {}
            subjects += page
            if not page or len(subjects) >= info.get("total", 0):
                return subjects

    async def purge(self, subject: str, before: int | None, deadline: float) -> None:
        """Remove the messages of a subject, or pattern, with sequences below `before`; None for all."""
        request: dict[str, Any] = {"filter": subject} | ({"seq": before} if before else {})
        await self._ask(f"STREAM.PURGE.{self.stream}", request, deadline)

    async def info(self, deadline: float) -> dict[str, Any]:
        """Return configuration, state and servers of the stream."""
        return await self._ask(f"STREAM.INFO.{self.stream}", {}, deadline)

    # -- requests ---

    async def _publish(self, messages: Sequence[Outgoing], deadline: float) -> int:
        headers = [
            {} if each.expected is None else {"Nats-Expected-Last-Subject-Sequence": str(each.expected)}
            for each in messages
        ]
        if len(messages) > 1:
            batch = uuid4().hex
            for number, each in enumerate(headers, 1):
                each.update({"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)})
            headers[-1]["Nats-Batch-Commit"] = "1"
        *others, last = messages
        for message, each in zip(others, headers, strict=False):
            await self._client.publish(message.subject, message.data, headers=each)
        answer = await self._api.request(last.subject, last.data, deadline, headers[-1])
        return int(answer["seq"])

    async def _find_attempt(
        self, messages: Sequence[Outgoing], deadline: float, *, is_first: bool
    ) -> int | None:
        """Return the last sequence of messages that an attempt has stored; None if the leader is behind.

        Raises: SubjectChanged when another message took the place of one, or the stream was replaced.
        """
        for index, message in enumerate(messages):
            if message.expected is None:
                continue
            other = await self.next(message.subject, message.expected + 1, deadline)
            if other is not None and other.data == message.data:
                return other.sequence - index + len(messages) - 1
            if other is not None or await self._has_other_end(message.subject, message.expected, deadline):
                raise SubjectChanged(message, None if is_first else other)
        return None

    async def _get(self, request: Mapping[str, Any], deadline: float) -> StoredMessage | None:
        # STREAM.MSG.GET is answered by the stream's leader, DIRECT.GET by any replica.
        where = f"STREAM.MSG.GET.{self.stream}"
        try:
            message = (await self._ask(where, request, deadline))["message"]
        except ApiError as refused:
            if refused.number in _NO_MESSAGE:
                return None
            raise Unavailable(f"Stream {self.stream} could not be read: {refused}.") from refused
        data = base64.b64decode(message.get("data") or "")
        return StoredMessage(message["subject"], message["seq"], data)

    async def _has_other_end(self, subject: str, expected: int, deadline: float) -> bool:
        """Return whether the subject ends before the expected message: the stream was replaced."""
        last = await self.last(subject, deadline)
        return (0 if last is None else last.sequence) < expected

    async def _ask(self, where: str, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        body = msgspec.json.encode(request)
        what = f"Stream {self.stream} could not be used"
        attempts = iter(FIRST_ATTEMPTS_SECONDS)
        while True:
            seconds = next(attempts, ATTEMPT_SECONDS)
            try:
                return await self._api.request(f"{API}.{where}", body, deadline, seconds=seconds)
            except ApiError as refused:
                if refused.number == STREAM_NOT_FOUND:
                    raise StreamMissing from refused
                if refused.is_final:
                    raise
                reason: Exception = refused
            except (NatsError, OSError, TimeoutError) as error:
                reason = error
            await self._pause(deadline, what, reason)

    async def _read_page(self, request: Mapping[str, Any], last: int, deadline: float) -> list[StoredMessage]:
        """Return messages up to sequence `last` that any replica has; fewer if some are lost on the way."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox)
        page: list[StoredMessage] = []
        try:
            where = f"{API}.DIRECT.GET.{self.stream}"
            await self._client.publish(where, msgspec.json.encode(request), reply=inbox)
            while len(page) < request["batch"]:
                seconds = min(ATTEMPT_SECONDS, deadline - _now())
                message = await subscription.next_msg(timeout=max(seconds, 0.001))
                headers = message.headers or {}
                if "Status" in headers:
                    break
                stored = StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data)
                page.append(stored)
                if stored.sequence >= last:
                    break
        except (NatsError, OSError, TimeoutError):
            if not page:
                raise
        finally:
            with suppress(NatsError, OSError):  # it ended with its connection
                await subscription.unsubscribe()
        return page

    async def _pause(self, deadline: float, what: str, reason: BaseException) -> None:
        if _now() + PAUSE_SECONDS >= deadline:
            raise Unavailable(
                f"{what}: {str(reason).rstrip('.') or type(reason).__name__}. Check that most of its servers "
                "run, and that it has a leader."
            ) from reason
        await asyncio.sleep(PAUSE_SECONDS)


def _headers(encoded: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in encoded.decode().split("\r\n")[1:])
    return {name: value.strip() for name, _, value in lines}


def _now() -> float:
    return asyncio.get_running_loop().time()
