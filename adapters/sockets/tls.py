"""Certificates of servers: loaded from files, checked, and reloaded while connections are served."""

import ssl
from contextlib import suppress
from typing import Any, NamedTuple

from postroom.adapters.sockets.client_tls import explain_reason, load_pair, read_pem, refuse_password
from postroom.adapters.sockets.tls_listener import AlertingContext
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
        """Return the context that was loaded last."""
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


def _load(files: TlsFiles) -> LoadedTls:
    for _ in range(2):  # the files may be replaced in between
        before = _read(files)
        context = _make_context(before[2])
        load_pair(context, files.certificate, files.key, ("tls_certificate", "tls_key"))
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
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without tickets every connection is checked by the current authorities.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("latin-1"))
        except ssl.SSLError as error:
            raise InvalidRequest(f"tls_client_ca is malformed: {explain_reason(error)}.") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _warn_of_expiry(files: TlsFiles) -> None:
    """Log a warning when a certificate is not valid now.

    The standard library tells the dates of a certificate that a peer has verified, so one end of a handshake
    in memory trusts it as its own authority.
    """
    server = _make_context(None)
    server.load_cert_chain(files.certificate, files.key, refuse_password)
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
