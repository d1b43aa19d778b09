"""Publishing to JetStream (SDS-047 PORT-047-003 `JetStreamPublisher`)."""

import asyncio
from collections.abc import Mapping

from nats.aio.client import Client
from nats.errors import BadHeaderError
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from postroom.application.ports.publisher import PublishAck
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

MAX_PENDING = 4_000
TIMEOUT_MS = 5_000
# Temporary errors that NATS reports as bad requests: an account limit is reached; a message with the same id
# is being stored.
_TEMPORARY = (10002, 10158)
_HEADER_LINES = len(b"NATS/1.0\r\n\r\n")
_HEADER_EXTRA = len(b": \r\n")


class JetStreamPublisher:
    """A publisher to the streams of a NATS server, with up to `max_pending` messages in flight.

    Messages of one caller are stored in the order of the calls, as long as none fails.

    Arguments:
        client: a connection; see `connect`.
        timeout_ms: time within which the server must confirm a message.
        max_pending: maximum number of unconfirmed messages; further calls wait.
    """

    def __init__(self, client: Client, timeout_ms: int = TIMEOUT_MS, max_pending: int = MAX_PENDING) -> None:
        self._client = client
        self._stream = client.jetstream()
        self._timeout_ms = timeout_ms
        self._pending = asyncio.Semaphore(max_pending)

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message and return once a stream has stored it (SDS-047 PORT-047-003).

        Raises:
            InvalidRequest: no stream has the subject, or the message is too large or has an invalid header.
            Unavailable: it is unknown whether the message was stored; publish it again.
        """
        _check_subject(subject)
        self._check_size(subject, payload, headers)
        try:
            async with self._pending:
                stored = await self._stream.publish(
                    subject, payload, timeout=self._timeout_ms / 1_000, headers=dict(headers)
                )
        except TimeoutError:
            raise Unavailable(
                f"NATS did not confirm a message at {subject} within {self._timeout_ms:,} ms; check that the "
                "server runs, that its replicas are up, and that publishing there is permitted."
            ) from None
        except NoStreamResponseError:
            raise await self._explain_no_response(subject) from None
        except APIError as error:
            raise _from_api(subject, error) from error
        except BadHeaderError as error:
            raise InvalidRequest(
                f"A message for {subject} has the header {error}, which is not valid in NATS; rename it."
            ) from error
        except (NatsError, OSError) as error:
            raise Unavailable(
                f"NATS did not confirm a message at {subject}: {str(error) or type(error).__name__}; "
                "it is retried."
            ) from error
        return PublishAck(stored.stream, stored.seq, bool(stored.duplicate))

    async def close(self) -> None:
        """Close the connection; closing twice is fine."""
        await self._client.close()

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        # The server closes the connection after a message that is too large, and all others in flight fail.
        size = len(payload) + _HEADER_LINES
        for name, value in headers.items():
            if "\r" in value or "\n" in value:
                raise InvalidRequest(
                    f"Header {name} of a message for {subject} has a line break, which is not valid in "
                    "NATS; remove it."
                )
            size += len(name.encode()) + len(value.encode()) + _HEADER_EXTRA
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
        return Unavailable(f"Stream {name} has no leader, so {subject} was not published; it is retried.")


def _check_subject(subject: str) -> None:
    if any(part in ("", "*", ">") for part in subject.split(".")) or any(c.isspace() for c in subject):
        raise InvalidRequest(
            f"{subject!r} is not a subject to publish to; write tokens separated by dots, without spaces or "
            "wildcards, such as sea.event.order_placed.v1."
        )


def _from_api(subject: str, error: APIError) -> PostroomError:
    reason = f"{error.description or 'no reason given'} (NATS error {error.err_code})"
    if (error.code or 0) >= 500 or error.err_code in _TEMPORARY:
        return Unavailable(f"The stream at {subject} could not store a message: {reason}; it is retried.")
    return InvalidRequest(
        f"The stream at {subject} refuses a message: {reason}; change the message or the stream's limits."
    )
