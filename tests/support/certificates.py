"""Certificates, and the secrets of tests, as files."""

import datetime
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.servers.process import LOOPBACK

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
PASSWORD, TOKEN = "canary-password", "canary-token"


class Certificates:
    """Certificates of two authorities, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ours, self._others = trustme.CA(), trustme.CA()
        self.ca = self._write("ca", self._ours.cert_pem)
        self.other_ca = self._write("other-ca", self._others.cert_pem)
        self.server = self._issue("server", self._ours, LOOPBACK)
        self.client = self._issue("client", self._ours, "client@example.com")
        self.user = self._issue_user("relay")
        self.foreign = self._issue("foreign", self._others, "client@example.com")
        long_ago = PAST - datetime.timedelta(days=30)
        self.expired = self._issue("expired", self._ours, LOOPBACK, not_before=long_ago, not_after=PAST)
        self.other_host = self._issue("other-host", self._ours, "other.example")
        self.password = self._write("password", PASSWORD.encode() + b"\n")
        self.token = self._write("token", TOKEN.encode())

    def _issue(self, name: str, ca: trustme.CA, identity: str, **options: Any) -> tuple[str, str]:
        issued = ca.issue_cert(identity, **options)
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        return self.write(name, chain), self.write(f"{name}-key", issued.private_key_pem.bytes())

    def _issue_user(self, name: str) -> tuple[str, str]:
        """Issue a user's certificate without the critical extensions of `trustme`, which Erlang refuses."""
        authority = x509.load_pem_x509_certificate(self._ours.cert_pem.bytes())
        signer = serialization.load_pem_private_key(self._ours.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(PAST)
            .not_valid_after(authority.not_valid_after_utc)
            .sign(signer, hashes.SHA256())
        )
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
        return self.write(name, certificate.public_bytes(pem)), self.write(f"{name}-key", private)

    def _write(self, name: str, blob: Any) -> str:
        return self.write(name, blob if isinstance(blob, bytes) else blob.bytes())

    def write(self, name: str, content: bytes) -> str:
        """Write a file and return its path."""
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

    def tls(self, pair: tuple[str, str], **settings: Any) -> dict[str, Any]:
        """Return the server's setting of TLS with a certificate and its key."""
        return {"tls": {"cert_file": pair[0], "key_file": pair[1], "ca_file": self.ca} | settings}
