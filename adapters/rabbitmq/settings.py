"""Settings of RabbitMQ, importable without its client."""

import ssl
from urllib.parse import quote, urlsplit, urlunsplit

from postroom.application.ingest.broker_access import BrokerAccess
from postroom.domain.errors import InvalidRequest

RABBITMQ_SCHEMES = ("amqp", "amqps")


class RabbitmqSettings(BrokerAccess, frozen=True, kw_only=True):
    """Address of RabbitMQ, and access to it.

    Arguments:
        url: `amqp://host:5672/vhost`, or `amqps://` with TLS.

    Raises: InvalidRequest for another scheme or an invalid address; see also `BrokerAccess`.
    """

    url: str

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in RABBITMQ_SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:  # the message omits the URL: it may contain a password
            raise InvalidRequest(
                "The RabbitMQ URL is invalid; write amqp://host:5672/vhost, or amqps:// with TLS."
            )
        if not self.needs_tls and (self.ca is not None or self.certificate is not None):
            raise InvalidRequest("The RabbitMQ settings ca and certificate need TLS; write amqps://.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown_url!r})"

    @property
    def needs_tls(self) -> bool:
        """Return whether connections are encrypted."""
        return self.url.startswith("amqps://")

    @property
    def shown_address(self) -> str:
        """Return the host and virtual host, without user and password, for messages and logs."""
        parts = urlsplit(self.url)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def shown_url(self) -> str:
        """Return the URL without user and password, for messages and logs."""
        return f"{self.url.partition('://')[0]}://{self.shown_address}"

    def login_url(self) -> str:
        """Return the URL with user and password; raise InvalidRequest if the password file can't be read.

        Without a user, a client's certificate authenticates (EXTERNAL).
        """
        password = self.read_password()
        parts = urlsplit(self.url)
        if self.certificate is not None and self.user is None and "@" not in parts.netloc:
            return urlunsplit(parts._replace(query=f"{parts.query}&auth=external".lstrip("&")))
        if self.user is None or password is None:
            return self.url
        user = f"{quote(self.user, safe='')}:{quote(password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}"))

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, or None without TLS; raise InvalidRequest if a file can't be read."""
        if not self.needs_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise InvalidRequest(
                f"A TLS file of RabbitMQ can't be read: {error}; ca, certificate and key are PEM files."
            ) from error
        return context
