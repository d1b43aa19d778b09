"""TLS and authentication of connections to Kafka and RabbitMQ, with secrets in files."""

import msgspec

from postroom.domain.errors import InvalidRequest


class BrokerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """TLS and authentication; all paths are of files.

    Arguments:
        user, password_file: a user, and the file with the password.
        ca: certificates, in PEM, of those who may sign the broker's; None takes the system's.
        certificate, key: the client's own certificate with its chain, and its key, in PEM.

    Raises: InvalidRequest for settings that need each other.
    """

    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for one, other in (("user", "password_file"), ("certificate", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise InvalidRequest(f"The settings {one} and {other} need each other; set both.")
