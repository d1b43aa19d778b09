"""The publisher and dead-letter queue ports over JetStream."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import NoReturn

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from postroom.adapters.nats.client import SupervisedClient
from postroom.application.ports.outbox import NotStored, PublishAck
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable

MAX_PENDING = 4_000
TIMEOUT_MS = 5_000
# Temporary errors that NATS reports as bad requests: an account limit is reached; a message with the same id
# is being stored.
_TEMPORARY = (10002, 10158)
# Errors of JetStream as a whole: no leader of the cluster, not enabled for the account, not enabled.
_OUTAGES = (10008, 10039, 10076)
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class _Error(msgspec.Struct):
    """Error of JetStream; `code` is an HTTP status."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    """Answer of a stream to a message."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class JetStreamPublisher:
    """A publisher to the streams of a NATS server, with up to `max_pending` messages in flight.

    Messages of one caller are stored in the order of the calls, as long as none fails.

    Arguments:
        client: a connection; see `connect`.
        timeout_ms: time within which the server must confirm a message.
        max_pending: maximum number of unconfirmed messages; further calls wait.
    """

    def __init__(
        self, client: SupervisedClient, timeout_ms: int = TIMEOUT_MS, max_pending: int = MAX_PENDING
    ) -> None:
        self._client = client
        self._stream = client.jetstream()
        self._timeout_ms = timeout_ms
        self._pending = asyncio.Semaphore(max_pending)

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message and return once a stream has stored it (SDS-047 PORT-047-003).

        Raises:
            InvalidRequest: no stream has the subject, or the message is too large or has an invalid header.
            NotStored: the stream is full or has no leader.
            Unavailable: it is unknown whether the message was stored; publish it again.
        """
        address, header = _encode_subject(subject), _encode_headers(subject, headers)
        self._check_size(subject, len(header) + len(payload))
        try:
            async with self._pending:
                reply = await self._client.request_bytes(address, header, payload, self._timeout_ms / 1_000)
            answer = _decode(reply.data)
        except TimeoutError:
            raise Unavailable(
                f"NATS did not confirm a message at {subject} within {self._timeout_ms:,} ms; check that the "
                "server runs, that its replicas are up, and that publishing there is permitted."
            ) from None
        except NoRespondersError:
            raise await self._explain_no_response(subject) from None
        except (NatsError, OSError, msgspec.MsgspecError) as error:
            raise Unavailable(
                f"NATS did not confirm a message at {subject}: {str(error) or type(error).__name__}; "
                "it is retried."
            ) from error
        if answer.error is not None:
            raise _refusal(subject, answer.error)
        return PublishAck(answer.stream, answer.seq, answer.duplicate)

    async def close(self) -> None:
        """Close the connection; closing twice is fine."""
        await self._client.close()

    def _check_size(self, subject: str, size: int) -> None:
        # The server closes the connection after a message that is too large, and all others in flight fail.
        if size > self._client.max_payload:
            raise InvalidRequest(
                f"A message for {subject} has {size:,} bytes with its headers, and the server's limit is "
                f"{self._client.max_payload:,}; send a reference to the data instead, or raise max_payload."
            )

    async def _explain_no_response(self, subject: str) -> PostroomError:
        # A stream without a leader does not respond either, so check whether a stream exists.
        try:
            name = await self._stream.find_stream_name_by_subject(subject)
        except NotFoundError:
            return InvalidRequest(
                f"No stream has the subject {subject}; define one under [streams] in the settings file and "
                "run postroom streams apply."
            )
        except (NatsError, OSError, TimeoutError) as error:
            return Unavailable(
                f"No stream answered for {subject}, and the JetStream request for its name failed: "
                f"{str(error) or type(error).__name__}; it is retried."
            )
        return NotStored(f"Stream {name} has no leader, so {subject} was not published; it is retried.")


@lru_cache(maxsize=4_096)
def _encode_subject(subject: str) -> bytes:
    if any(part in ("", "*", ">") for part in subject.split(".")) or any(c.isspace() for c in subject):
        raise InvalidRequest(
            f"{subject!r} is not a subject to publish to; write tokens separated by dots, without spaces or "
            "wildcards, such as sea.event.order_placed.v1."
        )
    return subject.encode()


def _encode_headers(subject: str, headers: Mapping[str, str]) -> bytes:
    text = "\r\n".join([f"{name}: {value}" for name, value in headers.items()])
    breaks = max(len(headers) - 1, 0)
    if text.count("\r") != breaks or text.count("\n") != breaks or not all(map(_is_header_name, headers)):
        _refuse_headers(subject, headers)
    return f"NATS/1.0\r\n{text}\r\n\r\n".encode() if headers else b"NATS/1.0\r\n\r\n"


@lru_cache(maxsize=4_096)
def _is_header_name(name: str) -> bool:
    return _HEADER_NAME.fullmatch(name) is not None


def _refuse_headers(subject: str, headers: Mapping[str, str]) -> NoReturn:
    for name in headers:
        if not _is_header_name(name):
            raise InvalidRequest(
                f"A message for {subject} has the header {name!r}, which is not valid in NATS; rename it."
            )
    name = next(name for name, value in headers.items() if "\r" in value or "\n" in value)
    raise InvalidRequest(
        f"Header {name} of a message for {subject} has a line break, which is not valid in NATS; remove it."
    )


def _refusal(subject: str, error: _Error) -> PostroomError:
    reason = f"{error.description or 'no reason given'} (NATS error {error.err_code})"
    if error.code >= 500 or error.err_code in _TEMPORARY:
        kind = Unavailable if error.err_code in _OUTAGES else NotStored
        return kind(f"The stream at {subject} could not store a message: {reason}; it is retried.")
    return InvalidRequest(
        f"The stream at {subject} refuses a message: {reason}; change the message or the stream's limits."
    )


BATCH = 500
TIMEOUT_SECONDS = 5.0
_SEQUENCE_NOT_FOUND = 10043
_NO_MESSAGE = "no message found"  # NATS's text for the first message of a stream; its code is unspecific


class JetStreamDeadLetterQueue:
    """Dead letters in a JetStream stream.

    Arguments:
        client: a connection; see `connect`.
    """

    def __init__(self, client: Client) -> None:
        self._stream = client.jetstream()

    async def check(self, subject: str) -> None:
        """Raise `NotFound` if no stream stores the subject."""
        async with _translate_errors(subject):
            await self._stream.find_stream_name_by_subject(subject)

    async def read(self, subject: str, limit: int, *, start: int = 1) -> Sequence[SourceMessage]:
        """Return the oldest messages at a subject; see `DeadLetterQueue.read`."""
        async with _translate_errors(subject):
            stream = await self._stream.find_stream_name_by_subject(subject)
            subscription = await self._stream.pull_subscribe(
                subject,
                stream=stream,
                config=ConsumerConfig(
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=start,
                    ack_policy=AckPolicy.NONE,
                    inactive_threshold=60,
                    mem_storage=True,
                ),
            )
            try:
                pending = (await subscription.consumer_info()).num_pending or 0
                messages: list[SourceMessage] = []
                while (missing := min(limit, pending) - len(messages)) > 0:
                    for message in await subscription.fetch(min(BATCH, missing), TIMEOUT_SECONDS):
                        sequence = str(message.metadata.sequence.stream)
                        messages.append(
                            SourceMessage(
                                message.subject, message.data, message.headers or {}, 1, sequence, stream
                            )
                        )
                return messages
            finally:
                await subscription.unsubscribe()

    async def find(self, subject: str, sequence: str) -> SourceMessage | None:
        """Return a message by its sequence; see `DeadLetterQueue.find`."""
        if not (sequence.isdecimal() and 0 < int(sequence) < 1 << 63):
            raise InvalidRequest(
                f"{sequence!r} is not the number of a dead letter; list them to see their numbers."
            )
        messages = [
            each for each in await self.read(subject, 1, start=int(sequence)) if each.sequence == sequence
        ]
        return messages[0] if messages else None

    async def remove(self, message: SourceMessage) -> None:
        """Remove a message permanently; see `DeadLetterQueue.remove`."""
        async with _translate_errors(message.subject):
            try:
                await self._stream.delete_msg(message.token, int(message.sequence))
            except (NotFoundError, ServiceUnavailableError):
                raise
            except APIError as error:
                is_missing = error.err_code == _SEQUENCE_NOT_FOUND or _NO_MESSAGE in (error.description or "")
                if not is_missing:
                    raise InvalidRequest(
                        f"Stream {message.token} refuses to delete message {message.sequence}: "
                        f"{error.description}; allow deletes in its configuration."
                    ) from error


@asynccontextmanager
async def _translate_errors(subject: str) -> AsyncIterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise NotFound(
            f"No stream has the subject {subject}; define one under [streams] in the settings file and run "
            "postroom streams apply."
        ) from error
    except (NatsError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"The JetStream request for {subject} failed: {str(error) or type(error).__name__}; try again."
        ) from error
