"""Certificates of clients, and files in PEM."""

import re
import ssl
from pathlib import Path
from typing import NoReturn, Protocol

from postroom.domain.errors import InvalidRequest


class ClientFiles(Protocol):
    """Paths of files in PEM; see `ClientTls`."""

    @property
    def ca(self) -> str | None:
        """Return that of the authorities that are trusted; None trusts those of the system."""

    @property
    def certificate(self) -> str | None:
        """Return that of the client's certificate."""

    @property
    def key(self) -> str | None:
        """Return that of its key."""


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
        setting: what names the file, for errors.
        kind: what it has to contain, such as `CERTIFICATE`.

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
        names: of what names the files, for errors.

    Raises: InvalidRequest when they are malformed, the key is another one's, or it is encrypted.
    """
    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequest(
                f"{names[1]}: {key} is not the key of the certificate {certificate}; name the one that it "
                "was made with."
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
        text: of the error, as OpenSSL and gRPC write it.
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
