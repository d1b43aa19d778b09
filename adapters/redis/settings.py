"""Settings of Redis, importable without its client."""

from typing import Any
from urllib.parse import urlsplit

from postroom.application.ingest.broker_access import BrokerAccess
from postroom.domain.errors import InvalidRequest

_FILES = {"ca": "ssl_ca_certs", "certificate": "ssl_certfile", "key": "ssl_keyfile"}


class RedisSettings(BrokerAccess, frozen=True, kw_only=True):
    """Address of Redis, and access to it.

    Arguments:
        url: `redis://`, `rediss://` with TLS, or `unix://`, as in redis-py; `user` and `password_file` take
            precedence over its user and password.

    Raises: InvalidRequest for settings that need TLS if the URL has none; see also `BrokerAccess`.
    """

    url: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith("rediss://") and (self.ca is not None or self.certificate is not None):
            raise InvalidRequest("The Redis settings ca and certificate need TLS; write rediss://.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown_address!r})"

    @property
    def shown_address(self) -> str:
        """Return host and path of the URL, without user and password, for messages and logs."""
        parts = urlsplit(self.url)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"

    def client_options(self) -> dict[str, Any]:
        """Return the options of redis-py; raise InvalidRequest if the password file can't be read."""
        options: dict[str, Any] = {"url": self.url}
        options |= {option: path for name, option in _FILES.items() if (path := getattr(self, name))}
        if (password := self.read_password()) is not None:
            parts = urlsplit(self.url)  # redis-py prefers the user of the URL
            address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            options |= {"url": address, "username": self.user, "password": password}
        return options


class StreamConsumer(RedisSettings, frozen=True, kw_only=True):
    """A Redis stream and one of its consumer groups.

    Arguments:
        stream: key of the stream.
        group: the consumer group; created at the beginning of the stream if it is missing.
        field: the field with the message; an entry with a single field may name it differently.
        ack_wait_ms: how long a delivery may stay unsettled before the message is redelivered.
    """

    stream: str
    group: str
    field: str = "data"
    ack_wait_ms: int = 30_000
