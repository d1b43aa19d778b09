"""Access to a NATS server: TLS and authentication, with secrets in files."""

import re

import msgspec

from postroom.domain.errors import InvalidRequest


class NatsAccess(msgspec.Struct, frozen=True, kw_only=True):
    """TLS and authentication of connections to NATS; all paths are of files.

    Arguments:
        credentials: user JWT and its seed, as `nsc` writes them.
        nkey: seed of an nkey.
        user, password_file: a user, and the file with the password.
        token_file: file with a token.
        ca: certificates, in PEM, of those who may sign the server's; None takes the system's.
        certificate, key: the client's own certificate with its chain, and its key, in PEM.
        tls_first: begin with TLS, before the first message of a server with `handshake_first`.

    Raises: InvalidRequest for settings that exclude or need each other.
    """

    credentials: str | None = None
    nkey: str | None = None
    user: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    tls_first: bool = False

    def __post_init__(self) -> None:
        for one, other in (("user", "password_file"), ("certificate", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise InvalidRequest(f"The NATS settings {one} and {other} need each other; set both.")
        ways = [
            name for name in ("credentials", "nkey", "user", "token_file") if getattr(self, name) is not None
        ]
        if len(ways) > 1:
            raise InvalidRequest(
                f"The NATS settings {' and '.join(ways)} exclude each other; leave all out but one."
            )

    def access(self) -> dict[str, str | bool | None]:
        """Return the settings by name."""
        return {name: getattr(self, name) for name in NatsAccess.__struct_fields__}


def without_secrets(url: str) -> str:
    """Return URLs, separated by commas, without user, password and token, for messages and logs."""
    return re.sub(r"//[^/,]*@", "//", url)
