"""The publisher port over Redis streams."""

from collections.abc import Mapping
from typing import Any

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from postroom.adapters.redis.settings import RedisSettings
from postroom.adapters.redis.source import USER_ADVICE, connect_redis, reason
from postroom.application.ingest.broker_access import tls_advice
from postroom.application.ports.outbox import PublishAck
from postroom.domain.errors import InvalidRequest, Unavailable

_REFUSALS = ("WRONGTYPE", "NOPERM", "READONLY")


class RedisPublisher:
    """A publisher to the streams of a Redis server; headers are fields beside the message's.

    Arguments:
        field: the field with the message.

    Raises: InvalidRequest for a malformed URL.
    """

    def __init__(self, settings: RedisSettings, field: str = "data") -> None:
        self._where = settings.shown_address
        self._field = field
        self._client = connect_redis(settings, "publisher")

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Add one entry to the stream with the key `subject`; see `Publisher.publish`."""
        label = f"Redis stream {subject} of {self._where}"
        if self._field in headers:
            raise InvalidRequest(
                f"{label} refuses a message: its header {self._field} is the name of the field with the "
                "message; rename one of them."
            )
        fields: dict[Any, Any] = {self._field: payload, **headers}
        try:
            id_: Any = await self._client.xadd(subject, fields)
        except AuthenticationError as error:
            raise InvalidRequest(f"{label} can't be written: {reason(error)}; {USER_ADVICE}.") from error
        except ResponseError as error:
            kind = InvalidRequest if str(error).startswith(_REFUSALS) else Unavailable
            raise kind(f"{label} can't be written: {error}.") from error
        except (RedisError, OSError, TimeoutError) as error:
            advice = tls_advice(error) or "It is retried when Redis is available."
            raise Unavailable(f"{label} can't be written: {reason(error)}. {advice}") from error
        return PublishAck(subject, int(id_.partition(b"-")[0]), False)

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
        await self._client.aclose()
