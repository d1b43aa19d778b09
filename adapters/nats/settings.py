"""Settings of NATS, importable without its client."""

import re

import msgspec


class NatsSettings(msgspec.Struct, frozen=True):
    """Address and credentials of NATS.

    Arguments:
        url: one or more, separated by commas.
        credentials: path of a credentials file; None connects without credentials.
    """

    url: str = "nats://127.0.0.1:4222"
    credentials: str | None = None

    @property
    def shown_url(self) -> str:
        """Return the URLs without user, password and token, for messages and logs."""
        return re.sub(r"//[^/,]*@", "//", self.url)
