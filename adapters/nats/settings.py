"""Settings of NATS, importable without its client."""

import re

import msgspec

from postroom.domain.errors import InvalidRequest

_SCHEMES = ("nats", "tls", "ws", "wss")


class NatsSettings(msgspec.Struct, frozen=True):
    """Address and credentials of NATS.

    Arguments:
        url: one or more, separated by commas.
        credentials: path of a credentials file; None connects without credentials.

    Raises: InvalidRequest for a URL of another scheme than nats, tls, ws or wss.
    """

    url: str = "nats://127.0.0.1:4222"
    credentials: str | None = None

    def __post_init__(self) -> None:
        for url in self.url.split(","):
            scheme, separator, _ = url.strip().partition("://")
            if separator and scheme not in _SCHEMES:
                raise InvalidRequest(
                    f"A NATS URL begins with {scheme}://; write nats://host:4222, or tls://, ws:// or wss://."
                )

    @property
    def shown_url(self) -> str:
        """Return the URLs without user, password and token, for messages and logs."""
        return re.sub(r"//[^/,]*@", "//", self.url)
