"""The dead-letter queue port over JetStream: whatever stream keeps the subject `{context}.dlq.>`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

BATCH = 500
TIMEOUT_SECONDS = 5.0
_SEQUENCE_NOT_FOUND = 10043
_NO_MESSAGE = "no message found"  # said of the stream's first message only, with the code of any refusal


class JetStreamDeadLetterQueue:
    """Read and remove dead letters.

    Arguments:
        client: a connection; see `connect`.
    """

    def __init__(self, client: Client) -> None:
        self._stream = client.jetstream()

    async def check(self, subject: str) -> None:
        """See that a stream keeps a subject; raise `NotFound` where none does."""
        async with _answered(subject):
            await self._stream.find_stream_name_by_subject(subject)

    async def read(self, subject: str, limit: int) -> Sequence[SourceMessage]:
        """Return what lies at a subject; see `DeadLetterQueue.read`."""
        async with _answered(subject):
            stream = await self._stream.find_stream_name_by_subject(subject)
            subscription = await self._stream.pull_subscribe(
                subject,
                stream=stream,
                config=ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60, mem_storage=True),
            )
            try:
                pending = (await subscription.consumer_info()).num_pending or 0
                found: list[SourceMessage] = []
                while len(found) < min(limit, pending):
                    wanted = min(BATCH, limit - len(found), pending - len(found))
                    for message in await subscription.fetch(wanted, TIMEOUT_SECONDS):
                        sequence = str(message.metadata.sequence.stream)
                        found.append(
                            SourceMessage(
                                message.subject, message.data, message.headers or {}, 1, sequence, stream
                            )
                        )
                return found
            finally:
                await subscription.unsubscribe()

    async def remove(self, message: SourceMessage) -> None:
        """Remove a message for good; see `DeadLetterQueue.remove`."""
        async with _answered(message.subject):
            try:
                await self._stream.delete_msg(message.token, int(message.sequence))
            except (NotFoundError, ServiceUnavailableError):
                raise
            except APIError as error:
                is_gone = error.err_code == _SEQUENCE_NOT_FOUND or _NO_MESSAGE in (error.description or "")
                if not is_gone:
                    raise InvalidRequest(
                        f"Stream {message.token} does not let go of message {message.sequence}: "
                        f"{error.description}; allow deletes in its configuration."
                    ) from error


@asynccontextmanager
async def _answered(subject: str) -> AsyncIterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise NotFound(
            f"No stream keeps {subject}; define one under [streams] in the settings file and run postroom "
            "streams apply."
        ) from error
    except (NatsError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"JetStream could not be asked for {subject}: {str(error) or type(error).__name__}; try again."
        ) from error
