"""The dead-letter queue port over JetStream: the stream that stores the dead-letter subject."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

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
