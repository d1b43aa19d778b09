"""Certificates of servers and clients: loaded from files, checked, and reloaded while serving."""

import re
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from postroom.adapters.sockets.connections import AlertingContext
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest


class ClientFiles(Protocol):
    """Paths of files in PEM; see `ClientTls`."""

    @property
    def ca(self) -> str | None:
        """Return the path of the trusted authorities' certificates; None trusts the system's."""

    @property
    def certificate(self) -> str | None:
        """Return the path of the client's certificate."""

    @property
    def key(self) -> str | None:
        """Return the path of its key."""


def make_client_context(files: ClientFiles) -> ssl.SSLContext:
    """Return the TLS context of a client.

    Raises: InvalidRequest for a file that is missing, unreadable or malformed.
    """
    data = None if files.ca is None else read_pem("ca", files.ca, "CERTIFICATE").decode("latin-1")
    try:
        context = ssl.create_default_context(cadata=data)
    except ssl.SSLError as error:
        raise InvalidRequest(f"ca: {files.ca} is malformed: {explain_reason(error)}.") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.certificate is not None and files.key is not None:
        read_pem("certificate", files.certificate, "CERTIFICATE")
        read_pem("key", files.key, "PRIVATE KEY")
        load_pair(context, files.certificate, files.key, ("certificate", "key"))
    return context


def system_ca() -> str | None:
    """Return the file of the authorities that this system trusts; None if it has no such file."""
    return ssl.get_default_verify_paths().cafile


def read_pem(setting: str, path: str, kind: str) -> bytes:
    """Return the content of a file in PEM.

    Arguments:
        setting: name of the setting with the path, for errors.
        kind: required section, such as `CERTIFICATE`.

    Raises: InvalidRequest when it is missing, unreadable or malformed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{setting}: the file {path} can't be read: {error.strerror or error}; name another "
            "file, or make this one readable."
        ) from error
    if not (b"-----BEGIN " in data and kind.encode() + b"-----" in data):
        raise InvalidRequest(f"{setting}: the file {path} has no {kind} in PEM; name another.")
    return data


def load_pair(context: ssl.SSLContext, certificate: str, key: str, names: tuple[str, str]) -> None:
    """Load a certificate and its key.

    Arguments:
        names: names of the settings with the paths, for errors.

    Raises: InvalidRequest when they are malformed, or the key is encrypted or of another certificate.
    """
    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequest(
                f"{names[1]}: {key} is not the key of the certificate {certificate}; name its own key."
            ) from None
        raise InvalidRequest(
            f"{names[0]} {certificate} and {names[1]} {key} can't be used: {explain_reason(error)}."
        ) from None
    except OSError as error:
        raise InvalidRequest(f"{names[0]} {certificate} can't be read: {error.strerror}.") from None


def refuse_password() -> NoReturn:
    """Refuse an encrypted key; otherwise OpenSSL would ask for its password on the terminal."""
    raise InvalidRequest("The key of the certificate is encrypted; store it in PEM without a password.")


def explain_reason(error: ssl.SSLError) -> str:
    """Return the reason of an error in words."""
    return (error.reason or str(error)).lower().replace("_", " ")


def explain_tls_failure(text: str, where: str) -> str | None:
    """Return a sentence for a TLS error for which retrying does not help; None for any other error.

    Arguments:
        text: text of the error, as OpenSSL and gRPC write it.
        where: address of the server.
    """
    if match := _REFUSED_SERVER.search(text):
        reason = (match[1] or "its name is another one").strip(" .")
        return (
            f"The certificate of {where} is not accepted: {reason}; name its authority by "
            "ClientTls(ca=...), or replace the certificate."
        )
    if _REFUSED_CLIENT.search(text):
        return (
            f"{where} does not accept this client's certificate, or asks for one; pass "
            "ClientTls(certificate=..., key=...) of an authority that it trusts."
        )
    if _NO_TLS.search(text):
        return f"{where} does not speak TLS; connect by http:// or grpc://, or check the port."
    return None


_REFUSED_SERVER = re.compile(
    r"CERTIFICATE_VERIFY_FAILED\]?(?: certificate verify failed)?: (.*?)(?: \(_ssl|[\]};]|$)"
    r"|Hostname Verification Check failed|is not in peer certificate"
)
_REFUSED_CLIENT = re.compile(
    r"ALERT_(?:CERTIFICATE_REQUIRED|UNKNOWN_CA|BAD_CERTIFICATE|CERTIFICATE_EXPIRED|CERTIFICATE_UNKNOWN"
    r"|HANDSHAKE_FAILURE|ACCESS_DENIED|DECRYPT_ERROR)"
)
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE")


_NOT_YET_VALID, _EXPIRED = 9, 10
"""Error codes of OpenSSL's verification."""


class TlsFiles(NamedTuple):
    """Files in PEM of a server's certificate.

    Arguments:
        certificate: certificate, followed by the certificates of intermediate authorities.
        key: of the certificate, not encrypted.
        client_ca: certificates of the authorities that sign clients' certificates; None asks for no
            certificate.
    """

    certificate: str
    key: str
    client_ca: str | None = None


class LoadedTls(NamedTuple):
    """Contents of the files."""

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

        Raises: InvalidRequest as when it is made; the certificates loaded before stay in use.
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

    The standard library reports the dates only of a verified certificate, so one end of a handshake in memory
    trusts the certificate as its own authority.
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
