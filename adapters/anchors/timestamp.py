"""Time stamps of anchors by a time stamp authority (RFC 3161)."""

from datetime import datetime
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout
from cryptography.x509 import Certificate, load_pem_x509_certificates
from rfc3161_client import (
    HashAlgorithm,
    TimestampRequestBuilder,
    TimeStampResponse,
    VerificationError,
    VerifierBuilder,
    decode_timestamp_response,
)

from postroom.application.anchors import Anchor
from postroom.domain.errors import IntegrityFailure, InvalidRequest, Unavailable

TIMEOUT_SECONDS = 30
MAX_RESPONSE_BYTES = 1 << 16
HEADERS = {"Content-Type": "application/timestamp-query"}


async def request_timestamp(url: str, anchor: Anchor) -> bytes:
    """Return an authority's response for an anchor.

    Raises: Unavailable if the authority does not answer, or refuses the request.
    """
    builder = TimestampRequestBuilder(anchor.signed_bytes(), HashAlgorithm.SHA512)
    request = builder.build()
    try:
        async with (
            ClientSession(timeout=ClientTimeout(TIMEOUT_SECONDS)) as session,
            session.post(url, data=request.as_bytes(), headers=HEADERS) as answer,
        ):
            answer.raise_for_status()
            response = await answer.content.read(MAX_RESPONSE_BYTES + 1)
    except (ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or "no answer in time"
        raise Unavailable(f"The time stamp authority {url} can't be used: {reason}") from error
    decoded = _decode(response)
    if decoded is None or decoded.status > 1:
        status = "no time stamp" if decoded is None else f"status {decoded.status} {decoded.status_string}"
        raise Unavailable(f"The time stamp authority {url} answered with {status}; name another.")
    info = decoded.tst_info
    if info.nonce != request.nonce or info.message_imprint.message != request.message_imprint.message:
        raise Unavailable(
            f"The response of the time stamp authority {url} is for another request; name another."
        )
    return response


def load_certificates(path: Path) -> list[Certificate]:
    """Return the certificates in a PEM file; raise InvalidRequest if it contains none."""
    try:
        return load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} has no PEM certificate: {error}") from error


def verify_timestamp(anchor: Anchor, roots: list[Certificate]) -> datetime | None:
    """Return the time in an anchor's time stamp, or None if it has none.

    Raises: IntegrityFailure if the time stamp certifies other bytes, or comes from another authority.
    """
    if anchor.timestamp is None:
        return None
    builder = VerifierBuilder(roots=roots)
    response = _decode(anchor.timestamp)
    try:
        if response is None:
            raise VerificationError("it can't be decoded")
        builder.build().verify_message(response, anchor.signed_bytes())
    except (VerificationError, ValueError) as error:
        raise IntegrityFailure(
            f"The time stamp of the anchor of {anchor.log} at position {anchor.position} is not valid: "
            f"{error}. Name the certificate of its authority, or restore the anchor file."
        ) from error
    return response.tst_info.gen_time


def _decode(response: bytes) -> TimeStampResponse | None:
    try:
        return decode_timestamp_response(response)
    except ValueError:
        return None
