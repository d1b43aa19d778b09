"""A time stamp authority (RFC 3161): OpenSSL behind HTTP, with a certificate of its own root."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from threading import Thread
from typing import NamedTuple

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SETTINGS = """
[tsa]
default_tsa = authority
[authority]
serial = {folder}/serial
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha512
ess_cert_id_alg = sha256
"""
SECONDS = 20


class Authority(NamedTuple):
    """A running authority.

    Arguments:
        root: file of its root certificate, in PEM.
        faults: what it answers with instead of a time stamp: `refuse`, `garbage` or `other`.
    """

    url: str
    root: Path
    faults: list[str]


@contextmanager
def timestamp_authority(folder: Path) -> Iterator[Authority]:
    """Run an authority on loopback, whose files are in `folder`."""
    if which("openssl") is None:
        pytest.skip("no openssl on this machine, which signs time stamps")
    _write_certificates(folder)
    (folder / "serial").write_text("01\n")
    (folder / "settings").write_text(SETTINGS.format(folder=folder))
    faults: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = self.rfile.read(int(self.headers["Content-Length"]))
            fault = faults.pop() if faults else ""
            if fault == "refuse":
                self.send_error(503)
                return
            response = b"not a response" if fault == "garbage" else _sign(folder, query, fault)
            self.send_response(200)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Authority(f"http://127.0.0.1:{server.server_port}/", folder / "root.pem", faults)
    finally:
        server.shutdown()
        thread.join(SECONDS)
        server.server_close()


def _sign(folder: Path, query: bytes, fault: str) -> bytes:
    if fault == "other":
        (folder / "data").write_bytes(b"something else")
        query = _openssl(folder, "-query", "-data", "data", "-sha512", "-cert")
    (folder / "query").write_bytes(query)
    keys = ("-signer", "signer.pem", "-inkey", "signer.key")
    return _openssl(folder, "-reply", "-config", "settings", "-queryfile", "query", *keys)


def _openssl(folder: Path, *arguments: str) -> bytes:
    command = ["openssl", "ts", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=SECONDS).stdout


def _write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "root.pem")
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    root_key = authority._private_key  # only the purpose of time stamps is missing in trustme
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    signer = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "time stamps")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), critical=True)
        .sign(root_key, hashes.SHA256())
    )
    (folder / "signer.pem").write_bytes(signer.public_bytes(Encoding.PEM))
    (folder / "signer.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
