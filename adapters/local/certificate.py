"""Certificates of one ownership, by which the processes of other hosts know the owner."""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from postroom.adapters.sockets.tls_listener import AlertingContext
from postroom.domain.errors import Unavailable

NAME = "owner.postroom.invalid"
_ALWAYS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
"""Validity: the certificate ends with its ownership, and clocks of hosts differ."""


def issue_certificate() -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of a server with a key of its own, and its certificate in PEM."""
    from cryptography import x509  # late: only owners in databases need it, and it is slow to import
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, SHA256())
        .public_bytes(Encoding.PEM)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    with TemporaryDirectory(prefix="postroom-") as folder:  # OpenSSL loads keys from files only
        path = Path(folder, "certificate.pem")
        path.touch(mode=0o600)
        path.write_bytes(secret + certificate)
        context.load_cert_chain(path)
    return context, certificate.decode()


def trust_certificate(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a client that accepts this certificate and no other.

    Raises: Unavailable when it is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise Unavailable("The owner's certificate in the database can't be read; retry shortly.") from error
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
