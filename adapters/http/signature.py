"""Signatures of requests for handlers to authenticate the worker: Standard Webhooks, symmetric keys.

A request carries `webhook-id`, `webhook-timestamp` (Unix seconds) and `webhook-signature`, `v1,` and the
HMAC-SHA256 of id, timestamp and body, joined by dots, in base64. With two keys, while one replaces the other,
it carries two signatures; a handler accepts it with either key.
"""

import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from standardwebhooks import Webhook, WebhookVerificationError

from postroom.application.inbox.metrics import InboxSettings
from postroom.domain.errors import InvalidRequest, Unauthenticated

MIN_KEY_BYTES = 16
_PREFIX = "whsec_"
_HEADER_ID = re.compile(r"[!-\-/-~]{1,255}")
"""Ids that are valid in the header and in the signed text: visible ASCII without dots."""


def check_keys(keys: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return signing keys as bytes; text that begins with `whsec_` is base64.

    Raises: InvalidRequest without a key, or if one is malformed or too short; errors don't contain keys.
    """
    checked = tuple(map(_key_bytes, keys))
    if not checked:
        raise InvalidRequest(
            "Requests to handlers are signed and there is no key; set [inbox] signing_key_file, or "
            "POSTROOM_INBOX__SIGNING_KEY, to what `openssl rand -hex 32` prints."
        )
    if any(len(key) < MIN_KEY_BYTES for key in checked):
        raise InvalidRequest(
            f"A signing key must have at least {MIN_KEY_BYTES} bytes; make one with `openssl rand -hex 32`."
        )
    return checked


def read_keys(settings: InboxSettings) -> list[str]:
    """Return the signing keys that are set, from the settings or from files, the current one first.

    Raises: InvalidRequest if a file can't be read.
    """
    current = _read_key(settings.signing_key, settings.signing_key_file, "signing_key_file")
    previous = _read_key(
        settings.previous_signing_key, settings.previous_signing_key_file, "previous_signing_key_file"
    )
    return [key for key in (current, previous) if key]


def _read_key(key: str, file: str, setting: str) -> str:
    if key or not file:
        return key
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InvalidRequest(f"The file {file} of [inbox] {setting} can't be read: {reason}.") from None


def sign(message_id: str, body: bytes, timestamp: int, keys: Iterable[bytes]) -> dict[str, str]:
    """Return the headers that sign a body.

    Arguments:
        message_id: replaced by a UUID derived from it if it is not valid in a header.
        timestamp: Unix seconds, UTC.
        keys: the current one first; there is one signature for each.
    """
    if not _HEADER_ID.fullmatch(message_id):
        message_id = str(uuid5(NAMESPACE_URL, message_id))
    at, text = datetime.fromtimestamp(timestamp, UTC), body.decode()
    signatures = (Webhook(key).sign(message_id, at, text) for key in keys)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


def verify_signature(
    headers: Mapping[str, str], body: bytes, keys: str | bytes | Iterable[str | bytes]
) -> None:
    """Verify that a request was signed with one of the keys, within five minutes of now.

    Call it before decoding the body.

    Arguments:
        headers: of the request, as FastAPI, Starlette and aiohttp provide them.
        body: the body's bytes exactly as received, such as `await request.body()`.
        keys: the key, or two of them while one replaces the other.

    Raises: Unauthenticated, to be answered with 401.
    """
    reason = ""
    for key in check_keys((keys,) if isinstance(keys, str | bytes) else keys):
        try:
            Webhook(key).verify(body, dict(headers), json_parse=False)
        except WebhookVerificationError as error:
            reason = str(error)
        except ValueError:
            reason = "malformed header or body"
        else:
            return
    raise Unauthenticated(f"The signature of the request is invalid: {reason}. Check keys and clocks.")


def _key_bytes(key: str | bytes) -> bytes:
    if isinstance(key, bytes):
        return key
    if not key.startswith(_PREFIX):
        return key.encode()
    secret = key.removeprefix(_PREFIX)
    try:
        return b64decode(secret + "=" * (-len(secret) % 4), validate=True)
    except ValueError:
        raise InvalidRequest(f"A signing key that begins with {_PREFIX} must be base64.") from None
