"""Tokens of capabilities: a chain of HMAC-SHA256 tags over an identifier and its caveats (ADR 0050).

    tag 0 = HMAC(root key, context + identifier)
    tag i = HMAC(tag i-1, caveat i)

A token contains the last tag only. So its holder can add a caveat and compute the next tag without a key, but
can't change or remove earlier ones.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from hmac import compare_digest, digest
from typing import Literal, NamedTuple

import msgspec

from postroom.domain.arguments import check_int, check_text, check_type
from postroom.domain.capability.rights import (
    MAX_TIME_MS,
    Caveat,
    Rights,
    check_caveat,
    decode_caveat,
    encode_caveat,
)
from postroom.domain.errors import InvalidRequest, Unauthenticated

PREFIX = "prm1_"
"""Prefix of a token's text; 1 is the version of the format."""
KEY_PREFIX = "PRK1"
"""Prefix of the ids of access keys."""
MAX_TOKEN_CHARS = 4_000
MAX_CAVEATS = 32
NONCE_BYTES = 16
KEY_ID_BYTES = 8
SECRET_BYTES = 32
TAG_BYTES = 32
_CONTEXT = b"postroom capability 1\0"
_SHA256 = "sha256"


class RootKey(msgspec.Struct, frozen=True):
    """Key that signs capabilities; its secret is not in its `repr`.

    Arguments:
        id: 8 random bytes.
        secret: 32 random bytes.
        created_at: µs since 1970 UTC.
        retire_at: time from which tokens that it signed are invalid; None until it is replaced.
    """

    id: bytes
    secret: bytes
    created_at: int
    retire_at: int | None = None

    def __repr__(self) -> str:
        return f"RootKey({self.id.hex()})"

    def validate(self) -> "RootKey":
        """Return the key, or raise InvalidRequest."""
        for name, size in (("id", KEY_ID_BYTES), ("secret", SECRET_BYTES)):
            if len(check_type(f"A key's {name}", getattr(self, name), bytes)) != size:
                raise InvalidRequest(f"A key's {name} must have {size} bytes.")
        check_int("A key's created_at", self.created_at)
        if self.retire_at is not None:
            check_int("A key's retire_at", self.retire_at)
        return self


class Identifier(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Principal and rights of a capability, before its caveats narrow the rights.

    Arguments:
        key_id: of the root key that signed it.
        nonce: 16 random bytes; capabilities attenuated from it have the same nonce ("root nonce").
        principal: name of the party that it was issued to.
        epoch: epoch of capabilities; tokens of an earlier epoch than the current one are revoked.
        issued_at: ms since 1970 UTC.
    """

    version: Literal[1] = 1
    key_id: bytes
    nonce: bytes
    principal: str
    epoch: int
    issued_at: int
    rights: Rights

    def validate(self) -> "Identifier":
        """Return the identifier, or raise InvalidRequest."""
        if len(self.key_id) != KEY_ID_BYTES or len(self.nonce) != NONCE_BYTES:
            raise InvalidRequest(f"A key id has {KEY_ID_BYTES} bytes, and a nonce {NONCE_BYTES}.")
        if not check_text("The principal", self.principal, 1).isprintable() or not self.principal.strip():
            raise InvalidRequest("The principal must be non-blank printable text.")
        check_int("epoch", self.epoch)
        check_int("issued_at", self.issued_at, 0, MAX_TIME_MS)
        self.rights.validate()
        return self


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A capability as it is sent: encoded identifier and caveats, and the last tag.

    Its text is a secret; `repr` does not contain it.
    """

    identifier: bytes
    caveats: tuple[bytes, ...]
    tag: bytes

    def __repr__(self) -> str:
        return f"Token({len(self.caveats)} caveats)"

    def encode(self) -> str:
        """Return the token as text for `Authorization: Bearer`.

        Raises: InvalidRequest when it would have more than 4,000 characters.
        """
        text = _text(self)
        if len(text) > MAX_TOKEN_CHARS:
            raise InvalidRequest(
                f"The token would have {len(text)} characters, at most {MAX_TOKEN_CHARS} are possible; give "
                "fewer or shorter names, or issue a narrower one instead of attenuating."
            )
        return text

    @classmethod
    def decode(cls, text: object) -> "Token":
        """Parse the output of `encode`.

        Raises: Unauthenticated for anything else, without the text.
        """
        if type(text) is not str or not text.startswith(PREFIX) or len(text) > MAX_TOKEN_CHARS:
            raise _malformed_token()
        try:
            data = urlsafe_b64decode(text[len(PREFIX) :] + "=" * (-(len(text) - len(PREFIX)) % 4))
            token = _decode_token(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise _malformed_token() from None
        # Base64 and MessagePack have several encodings of the same value; only one is accepted.
        if _text(token) != text or len(token.tag) != TAG_BYTES or len(token.caveats) > MAX_CAVEATS:
            raise _malformed_token()
        return token

    def read_identifier(self) -> Identifier:
        """Return the identifier, which is not verified; raise Unauthenticated when it is malformed."""
        try:
            identifier = _decode_identifier(self.identifier).validate()
        except (msgspec.MsgspecError, ValueError, RecursionError, InvalidRequest):
            raise _malformed_token() from None
        if _encode(identifier) != self.identifier:
            raise _malformed_token()
        return identifier

    def read_caveats(self) -> list[Caveat]:
        """Return the caveats, which are not verified; raise Unauthenticated when one is unknown."""
        try:
            return [decode_caveat(each) for each in self.caveats]
        except InvalidRequest as error:
            raise Unauthenticated(f"{error} Attenuate the token again.", "caveat") from None


class AccessKey(NamedTuple):
    """A capability for clients that sign their requests: an id and a secret.

    Arguments:
        id: identifier and caveats of its token; no secret.
        secret: the tag of its token.
    """

    id: str
    secret: str


def to_access_key(token: Token) -> AccessKey:
    """Return a token as an access key."""
    text = urlsafe_b64encode(_encode((token.identifier, token.caveats))).rstrip(b"=").decode()
    return AccessKey(KEY_PREFIX + text, urlsafe_b64encode(token.tag).rstrip(b"=").decode())


def read_access_key(id_: str) -> Token:
    """Return the token of an access key with an empty tag; raise Unauthenticated when it is malformed."""
    if not id_.startswith(KEY_PREFIX) or len(id_) > MAX_TOKEN_CHARS:
        raise _malformed_token()
    text = id_.removeprefix(KEY_PREFIX)
    try:
        identifier, caveats = _decode_key(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _malformed_token() from None
    token = Token(identifier, caveats, b"")
    if len(caveats) > MAX_CAVEATS or to_access_key(token).id != id_:
        raise _malformed_token()
    return token


def complete(token: Token, secret: bytes) -> Token:
    """Return a token with the tag that a root key gives it."""
    return Token(token.identifier, token.caveats, _tag(token, secret))


_encode = msgspec.msgpack.encode
_decode_key = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes, ...]]).decode
_decode_token = msgspec.msgpack.Decoder(Token).decode
_decode_identifier = msgspec.msgpack.Decoder(Identifier).decode


def mint(identifier: Identifier, secret: bytes, caveats: Iterable[Caveat] = ()) -> Token:
    """Return the token of a new capability.

    Arguments:
        secret: of the root key `identifier.key_id`.

    Raises: InvalidRequest for a malformed identifier or caveat, or a token that would be too large.
    """
    data = _encode(identifier.validate())
    token = Token(data, (), digest(secret, _CONTEXT + data, _SHA256))
    for caveat in caveats:
        token = attenuate(token, caveat)
    token.encode()
    return token


def attenuate(token: Token, caveat: Caveat) -> Token:
    """Return a token that allows less; it needs no key.

    Raises: InvalidRequest for a malformed caveat, or when the token would have more than 32 caveats or 4,000
        characters.
    """
    data = encode_caveat(check_caveat(caveat))
    if len(token.caveats) >= MAX_CAVEATS:
        raise InvalidRequest(f"A token has at most {MAX_CAVEATS} caveats; issue a narrower one instead.")
    narrower = Token(token.identifier, (*token.caveats, data), digest(token.tag, data, _SHA256))
    narrower.encode()
    return narrower


def verify_tag(token: Token, secret: bytes) -> None:
    """Raise Unauthenticated unless the token was minted with this key.

    How long it takes depends on the token's size only, not on where the tags differ.

    Arguments:
        secret: of the root key that the identifier names.
    """
    if not compare_digest(_tag(token, secret), token.tag):
        raise not_issued_here()


def _tag(token: Token, secret: bytes) -> bytes:
    tag = digest(secret, _CONTEXT + token.identifier, _SHA256)
    for caveat in token.caveats:
        tag = digest(tag, caveat, _SHA256)
    return tag


def not_issued_here() -> Unauthenticated:
    """Return the error for a token of an unknown key or with a wrong tag; both look the same."""
    return Unauthenticated(
        "The capability was not signed by a key of this service, or was altered; get a new one.", "signature"
    )


def _malformed_token() -> Unauthenticated:
    return Unauthenticated(
        f"The capability is malformed; send the token, which begins with {PREFIX}, as it was issued.",
        "malformed",
    )


def _text(token: Token) -> str:
    return PREFIX + urlsafe_b64encode(_encode(token)).rstrip(b"=").decode()
