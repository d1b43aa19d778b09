"""Requests about the messages of a stream, each with a deadline (ADR 0147)."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from postroom.adapters.nats.client import SupervisedClient
from postroom.domain.errors import Unavailable

T = TypeVar("T")

ATTEMPT_SECONDS = 1.5
FIRST_ATTEMPTS_SECONDS = 0.3, 0.6
"""The same of the first requests to the API, which a stream without a leader does not answer."""
PAUSE_SECONDS = 0.05
PAGE_MESSAGES, PAGE_BYTES = 500, 8 << 20
"""Bounds of the messages that one request reads."""
MAX_BATCH = 1_000
"""The most messages that NATS takes in an atomic batch."""
HEADER_BYTES = 512
"""Upper bound of the headers of a message."""
API = "$JS.API"
_NO_MESSAGE = (10037, 10043)
_NO_STREAM = 10059
_WRONG_LAST_SEQUENCE = (10071, 10164)
_NO_HEADERS = b"NATS/1.0\r\n\r\n"


class StoredMessage(NamedTuple):
    """A message of a stream."""

    subject: str
    sequence: int
    data: bytes


class ApiError(Exception):
    """JetStream answered with an error.

    Arguments:
        is_final: whether a repetition would be refused, too.
    """

    def __init__(self, number: int, reason: str, *, is_final: bool) -> None:
        super().__init__(f"{reason} (NATS error {number})")
        self.number = number
        self.is_final = is_final


class SubjectChanged(Exception):
    """A message was not stored, as the last message of its subject is not the expected one."""


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
        self.stream = stream
        self.is_atomic = is_atomic

    @property
    def max_bytes(self) -> int:
        """Return the size of the largest message that the server takes."""
        return int(self._client.max_payload) - HEADER_BYTES

    async def append(
        self, subject: str, parts: Sequence[bytes], expected: int | None, deadline: float
    ) -> int:
        """Store messages of one subject in their order, all or none, and return the sequence of the last one.

        An attempt without an answer is repeated: of all attempts at most one can be stored, as each names the
        last sequence of the subject. It is believed to be stored when the stream has it.

        Arguments:
            parts: several are an atomic batch; a stream without those has them all, or a beginning of them.
            expected: sequence of the last message of the subject, or 0; None for any.

        Raises: SubjectChanged when the subject has another last message, Unavailable when it is unknown
            whether they are stored.
        """
        if len(parts) > 1 and not (self.is_atomic and len(parts) <= MAX_BATCH):
            for part in parts:
                expected = await self.append(subject, [part], expected, deadline)
            return expected or 0
        what = f"It is unknown whether stream {self.stream} has stored messages"
        while True:
            try:
                return await self._publish(subject, parts, expected, deadline)
            except ApiError as refused:
                reason: Exception = refused
                if refused.number in _WRONG_LAST_SEQUENCE and expected is not None:
                    stored = await self.next(subject, expected + 1, deadline)
                    if stored is not None and stored.data == parts[0]:
                        return stored.sequence + len(parts) - 1
                    if stored is not None or await self._has_other_end(subject, expected, deadline):
                        raise SubjectChanged from refused
                elif refused.is_final:
                    raise Unavailable(f"Stream {self.stream} refuses a message: {refused}.") from refused
            except (NatsError, OSError, TimeoutError) as error:
                reason = error
            await self._pause(deadline, what, reason)

    async def last(self, subject: str, deadline: float) -> StoredMessage | None:
        """Return the last message of a subject, which may have wildcards, or None."""
        return await self._get({"last_by_subj": subject}, deadline)

    async def next(self, subject: str, sequence: int, deadline: float) -> StoredMessage | None:
        """Return the first message of a subject from a sequence on, or None."""
        return await self._get({"seq": max(sequence, 1), "next_by_subj": subject}, deadline)

    async def find(self, subject: str, sequence: int, deadline: float) -> StoredMessage | None:
        """Do as `next` for messages that never change; any replica may answer."""
        body = msgspec.json.encode({"seq": max(sequence, 1), "next_by_subj": subject})
        where = f"{API}.DIRECT.GET.{self.stream}".encode()
        with suppress(NatsError, OSError, TimeoutError):
            seconds = max(min(ATTEMPT_SECONDS, deadline - _now()), 0.001)
            reply = await self._client.request_bytes(where, _NO_HEADERS, body, seconds)
            headers = _headers(reply.headers)
            if "Nats-Sequence" in headers:
                return StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), reply.data)
        return await self.next(subject, sequence, deadline)  # a replica may lag

    async def at(self, sequence: int, deadline: float) -> StoredMessage | None:
        """Return the message with a sequence, or None."""
        return await self._get({"seq": sequence}, deadline)

    async def read(self, subject: str, first: int, last: int, deadline: float) -> list[StoredMessage]:
        """Return the first messages of a subject from sequence `first` on; the leader has message `last`.

        A replica may answer, and messages may be lost on the way: the caller checks that none is missing.

        Returns: at least one.
        """
        while True:
            reason: Exception = TimeoutError("a replica lags behind its leader")
            try:
                request = {
                    "seq": first,
                    "batch": PAGE_MESSAGES,
                    "max_bytes": PAGE_BYTES,
                    "next_by_subj": subject,
                }
                if page := await read_page(self._client, self.stream, request, last, deadline):
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

    async def _publish(
        self, subject: str, parts: Sequence[bytes], expected: int | None, deadline: float
    ) -> int:
        headers = {} if expected is None else {"Nats-Expected-Last-Subject-Sequence": str(expected)}
        batch = {"Nats-Batch-Id": uuid4().hex} if len(parts) > 1 else {}
        for number, part in enumerate(parts[:-1], 1):
            some = headers if number == 1 else {}
            await self._client.publish(
                subject, part, headers=some | batch | {"Nats-Batch-Sequence": str(number)}
            )
        if batch:
            headers = batch | {"Nats-Batch-Sequence": str(len(parts)), "Nats-Batch-Commit": "1"}
        return int((await self._request(subject, parts[-1], deadline, headers))["seq"])

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
                return await self._request(f"{API}.{where}", body, deadline, seconds=seconds)
            except ApiError as refused:
                if refused.number == _NO_STREAM:
                    raise StreamMissing from refused
                if refused.is_final:
                    raise
                reason: Exception = refused
            except (NatsError, OSError, TimeoutError) as error:
                reason = error
            await self._pause(deadline, what, reason)

    async def _request(
        self,
        subject: str,
        payload: bytes,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        seconds: float = ATTEMPT_SECONDS,
    ) -> dict[str, Any]:
        seconds = min(seconds, deadline - _now())
        if seconds <= 0:
            raise TimeoutError
        lines = "".join(f"{name}:{value}\r\n" for name, value in (headers or {}).items())
        encoded = f"NATS/1.0\r\n{lines}\r\n".encode() if headers else _NO_HEADERS
        reply = await self._client.request_bytes(subject.encode(), encoded, payload, seconds)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if error := answer.get("error"):
            raise ApiError(
                error.get("err_code", 0),
                error.get("description", "no reason given"),
                is_final=error.get("code", 500) < 500,
            )
        return answer

    async def _pause(self, deadline: float, what: str, reason: BaseException) -> None:
        if _now() + PAUSE_SECONDS >= deadline:
            raise Unavailable(
                f"{what}: {str(reason).rstrip('.') or type(reason).__name__}. Check that most of its servers "
                "run, and that it has a leader."
            ) from reason
        await asyncio.sleep(PAUSE_SECONDS)


async def read_page(
    client: Client, stream: str, request: Mapping[str, Any], last: int, deadline: float
) -> list[StoredMessage]:
    """Return messages that any replica has; fewer than it has if some are lost on the way.

    Arguments:
        request: `seq`, the first sequence; `batch`, how many at most; `next_by_subj`; `max_bytes`.
        last: sequence of the last message to return.
        deadline: time of the event loop.

    Raises: NatsError, OSError or TimeoutError if none came.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    page: list[StoredMessage] = []
    try:
        await client.publish(f"{API}.DIRECT.GET.{stream}", msgspec.json.encode(request), reply=inbox)
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


def _headers(encoded: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in encoded.decode().split("\r\n")[1:])
    return {name: value.strip() for name, _, value in lines}


def _now() -> float:
    return asyncio.get_running_loop().time()
