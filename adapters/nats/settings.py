"""Settings of NATS, importable without its client."""

from postroom.application.ingest.broker_access import NatsAccess, without_secrets
from postroom.domain.errors import InvalidRequest

_SCHEMES = ("nats", "tls", "ws", "wss")


class NatsSettings(NatsAccess, frozen=True):
    """Address of NATS, and access to it.

    Arguments:
        url: one or more, separated by commas.

    Raises: InvalidRequest for a URL of another scheme than nats, tls, ws or wss; see also `NatsAccess`.
    """

    url: str = "nats://127.0.0.1:4222"

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.url.split(","):
            scheme, separator, _ = url.strip().partition("://")
            if separator and scheme not in _SCHEMES:
                raise InvalidRequest(
                    f"A NATS URL begins with {scheme}://; write nats://host:4222, or tls://, ws:// or wss://."
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown_url!r})"

    @property
    def shown_url(self) -> str:
        """Return the URLs without user, password and token, for messages and logs."""
        return without_secrets(self.url)

    @property
    def needs_tls(self) -> bool:
        """Return whether a connection without TLS is refused."""
        schemes = {url.strip().partition("://")[0] for url in self.url.split(",")}
        return self.tls_first or self.ca is not None or self.certificate is not None or "tls" in schemes
