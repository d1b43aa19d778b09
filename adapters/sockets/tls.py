"""Certificates of servers: loaded from files, checked, and loaded anew while connections are served."""

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest

_NOT_YET_VALID, _EXPIRED = 9, 10
"""Of OpenSSL's verification."""


class TlsFiles(NamedTuple):
    """Files in PEM of a server's certificate.

    Arguments:
        certificate: followed by those of intermediate authorities.
        key: of the certificate, not encrypted.
        client_ca: of the authorities that sign clients' certificates; None asks clients for none.
    """

    certificate: str
    key: str
    client_ca: str | None = None


class LoadedTls(NamedTuple):
    """What was read from the files."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext

    def __repr__(self) -> str:
        return "LoadedTls()"


class ServerTls:
    """Certificate of a server, whose files may be replaced while it serves.

    Raises, when it is made: InvalidRequest for a file that is missing, unreadable or malformed, and for a key
        of another certificate. A certificate that has expired is served with a warning in the log.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._loaded = _load(files)
        # A context can't forget an authority, so each connection takes the latest context.
        self.context = self._loaded.context
        self.context.sni_callback = self._take_latest

    @property
    def loaded(self) -> LoadedTls:
        """Return what was loaded last."""
        return self._loaded

    @property
    def asks_clients(self) -> bool:
        """Return whether clients must have a certificate."""
        return self._files.client_ca is not None

    def reload(self) -> None:
        """Read the files again, for new connections; connections that are open keep their certificate.

        Raises: InvalidRequest as when it is made; what was loaded before stays in use.
        """
        self._loaded = _load(self._files)

    def _take_latest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context


def make_client_context(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return the context of a client.

    Arguments:
        ca: file in PEM of the authorities that are trusted; None trusts those of the system.
        certificate, key: files in PEM for a server that asks for a certificate.

    Raises: InvalidRequest for a file that is missing, unreadable or malformed.
    """
    data = None if ca is None else read_pem("ca", ca, "CERTIFICATE")
    context = ssl.create_default_context(cadata=None if data is None else data.decode("latin-1"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None and key is not None:
        _load_pair(context, certificate, key, ("certificate", "key"))
    return context


def read_pem(setting: str, path: str, kind: str) -> bytes:
    """Return the content of a file in PEM.

    Arguments:
        setting: which one names the file, for errors.
        kind: of what it has to contain, such as `CERTIFICATE`.

    Raises: InvalidRequest when it is missing, unreadable or malformed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{setting}: the file {path} can't be read: {error.strerror or error}; name another, or mend it."
        ) from error
    if not (b"-----BEGIN " in data and kind.encode() + b"-----" in data):
        raise InvalidRequest(f"{setting}: the file {path} has no {kind} in PEM; name another.")
    return data


def _load(files: TlsFiles) -> LoadedTls:
    for _ in range(2):  # the files may be replaced in between
        before = _read(files)
        context = _make_context(before[2])
        _load_pair(context, files.certificate, files.key, ("tls_certificate", "tls_key"))
        if _read(files) == before:
            _warn_of_expiry(files)
            return LoadedTls(*before, context)
    raise InvalidRequest(f"tls_certificate: {files.certificate} changed while it was read; load it again.")


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    certificate = read_pem("tls_certificate", files.certificate, "CERTIFICATE")
    key = read_pem("tls_key", files.key, "PRIVATE KEY")
    ca = None if files.client_ca is None else read_pem("tls_client_ca", files.client_ca, "CERTIFICATE")
    return certificate, key, ca


def _make_context(client_ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without tickets every connection is checked by the present authorities.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("latin-1"))
        except ssl.SSLError as error:
            raise InvalidRequest(f"tls_client_ca is malformed: {_reason(error)}.") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_pair(context: ssl.SSLContext, certificate: str, key: str, names: tuple[str, str]) -> None:
    try:
        context.load_cert_chain(certificate, key, _refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequest(
                f"{names[1]}: {key} is not the key of {names[0]} {certificate}; name the key that it was made "
                "with."
            ) from None
        raise InvalidRequest(
            f"{names[0]} {certificate} and {names[1]} {key} can't be used: {_reason(error)}."
        ) from None
    except OSError as error:
        raise InvalidRequest(f"{names[0]} {certificate} can't be read: {error.strerror}.") from None


def _refuse_password() -> NoReturn:
    raise InvalidRequest("The key of the certificate is encrypted; store it in PEM without a password.")


def _warn_of_expiry(files: TlsFiles) -> None:
    """Log a warning when a certificate is not valid now.

    The standard library tells the dates of a certificate that a peer has verified, so one end of a handshake
    in memory trusts it as its own authority.
    """
    server = _make_context(None)
    server.load_cert_chain(files.certificate, files.key, _refuse_password)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with suppress(ssl.SSLError):
        client.load_verify_locations(files.certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends: list[Any] = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
                logger().warning(
                    "tls.certificate_invalid", certificate=files.certificate, reason=error.verify_message
                )
            return
        except ssl.SSLError:
            return


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
