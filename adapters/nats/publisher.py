"""Publishing to JetStream (SDS-047 PORT-047-003 `JetStreamPublisher`)."""

import asyncio
from collections.abc import Mapping

from nats.aio.client import Client
from nats.errors import BadHeaderError
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from postroom.application.ports.publisher import Published
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

MAX_PENDING = 4_000
TIMEOUT_MS = 5_000
# What NATS files under wrong requests, though it passes: a limit of the account is reached; a message of the
# same id is being stored, and a majority may agree on it or not.
_PASSING = (10002, 10158)
_HEADER_LINES = len(b"NATS/1.0\r\n\r\n")
_HEADER_EXTRA = len(b": \r\n")


class JetStreamPublisher:
    """Publish to the streams of a NATS server, up to `max_pending` messages in flight at once.

    Messages of one caller are stored in the order in which their `publish` began, as long as none fails.

    Arguments:
        client: a connection that is made again when it is lost; see `connect`.
        timeout_ms: how long the server may take to say that it stored a message.
        max_pending: further publishes wait until the server has answered one of these.
    """

    def __init__(self, client: Client, timeout_ms: int = TIMEOUT_MS, max_pending: int = MAX_PENDING) -> None:
        self._client = client
        self._stream = client.jetstream()
        self._timeout_ms = timeout_ms
        self._room = asyncio.Semaphore(max_pending)

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> Published:
        """Publish one message and return once a stream has stored it (SDS-047 PORT-047-003).

        Raises:
            InvalidRequest: no stream listens at the subject, or the message can't be sent at all.
            Unavailable: it is unknown whether the message was stored; publish it again.
        """
        _check_subject(subject)
        self._check_size(subject, payload, headers)
        # While disconnected the client would keep messages and send them late, after those that came later.
        if not self._client.is_connected:
            raise Unavailable(f"NATS is not connected, so {subject} was not published; it is tried again.")
        try:
            async with self._room:
                stored = await self._stream.publish(
                    subject, payload, timeout=self._timeout_ms / 1_000, headers=dict(headers)
                )
        except TimeoutError:
            raise Unavailable(
                f"NATS did not say within {self._timeout_ms:,} ms that it stored a message at {subject}; "
                "check that the server runs, that its replicas are up, and that we may publish there."
            ) from None
        except NoStreamResponseError:
            raise await self._why_nobody_listens(subject) from None
        except APIError as error:
            raise _from_api(subject, error) from error
        except BadHeaderError as error:
            raise InvalidRequest(
                f"A message for {subject} has the header {error}, which NATS can't carry; rename it."
            ) from error
        except (NatsError, OSError) as error:
            raise Unavailable(
                f"NATS could not take a message for {subject}: {str(error) or type(error).__name__}; "
                "it is tried again."
            ) from error
        return Published(stored.stream, stored.seq, bool(stored.duplicate))

    async def close(self) -> None:
        """Close the connection; closing twice is fine."""
        await self._client.close()

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        # The server hangs up on a message that is too large, and so on all that are in flight with it.
        size = len(payload) + _HEADER_LINES
        for name, value in headers.items():
            if "\r" in value or "\n" in value:
                raise InvalidRequest(
                    f"Header {name} of a message for {subject} has a line break, which NATS can't carry; "
                    "leave it out."
                )
            size += len(name.encode()) + len(value.encode()) + _HEADER_EXTRA
        if size > self._client.max_payload:
            raise InvalidRequest(
                f"A message for {subject} has {size:,} bytes with its headers, and NATS takes "
                f"{self._client.max_payload:,}; send a reference to the data instead, or raise max_payload."
            )

    async def _why_nobody_listens(self, subject: str) -> PostroomError:
        # A stream without a leader doesn't listen either, so the absence of one has to be asked for.
        try:
            name = await self._stream.find_stream_name_by_subject(subject)
        except NotFoundError:
            return InvalidRequest(
                f"No stream listens at {subject}; define one under [streams] in the settings file and run "
                "postroom streams apply."
            )
        except (NatsError, OSError, TimeoutError) as error:
            return Unavailable(
                f"No stream answered at {subject}, and JetStream could not be asked for one: "
                f"{str(error) or type(error).__name__}; it is tried again."
            )
        return Unavailable(f"Stream {name} has no leader to take {subject}; it is tried again.")


def _check_subject(subject: str) -> None:
    if any(part in ("", "*", ">") for part in subject.split(".")) or any(c.isspace() for c in subject):
        raise InvalidRequest(
            f"{subject!r} is no subject to publish to; write words with dots between them, without "
            "spaces and wildcards, such as sea.event.order_placed.v1."
        )


def _from_api(subject: str, error: APIError) -> PostroomError:
    said = f"{error.description or 'no reason given'} (NATS error {error.err_code})"
    if (error.code or 0) >= 500 or error.err_code in _PASSING:
        return Unavailable(f"The stream at {subject} could not store a message: {said}; it is tried again.")
    return InvalidRequest(
        f"The stream at {subject} refuses a message: {said}; change the message or the stream's limits."
    )
