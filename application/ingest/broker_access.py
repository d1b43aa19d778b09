"""TLS and authentication of connections to Kafka, RabbitMQ and Redis, with secrets in files."""

import ssl
from pathlib import Path

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

    def read_password(self) -> str | None:
        """Return the password, or None without a user; raise InvalidRequest if its file can't be read."""
        if self.password_file is None:
            return None
        try:
            return Path(self.password_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"The password file {self.password_file} can't be read: {error}; make it readable text."
            ) from error


TLS_ADVICE = "Check ca, and the name and expiry of the server's certificate"
_CERTIFICATE_ADVICE = "Check certificate and key, and that the server has TLS"


def tls_advice(error: BaseException | None) -> str | None:
    """Return what to do about an error that TLS caused, directly or indirectly; None for other errors."""
    visited: set[int] = set()  # a client that raises one error again and again makes it its own context
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{TLS_ADVICE}."
        if isinstance(error, ssl.SSLError):
            return f"{_CERTIFICATE_ADVICE}."
        error = error.__cause__ or error.__context__
    return None
