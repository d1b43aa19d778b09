"""The effective rights of a capability, and the decision whether they cover an operation."""

from collections.abc import Iterable

import msgspec

from postroom.domain.capability.rights import (
    BindPrincipal,
    Caveat,
    Expires,
    Mailboxes,
    MaxMessages,
    NotBefore,
    Operations,
    Quota,
    Right,
    Topics,
)
from postroom.domain.capability.token import Identifier, RootKey, Token, not_issued_here, verify_tag
from postroom.domain.errors import Forbidden, Unauthenticated
from postroom.domain.search import topic_matches

US_PER_MS = 1_000
ANY = "*"
"""The glob that every name matches."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The effective rights of a verified capability.

    Arguments:
        mailboxes, topics: lists of names and globs; one of each list must match.
        not_before, expires: start and end of its validity, ms since 1970 UTC; the end is excluded.
        max_messages: maximum number of messages a call; None is no limit.
        quotas: its quotas; all of them apply.
        binds_principal: whether messages sent with it have its principal.
    """

    key_id: bytes
    nonce: bytes
    principal: str
    epoch: int
    mailboxes: tuple[tuple[str, ...], ...]
    topics: tuple[tuple[str, ...], ...]
    operations: frozenset[Right]
    not_before: int
    expires: int
    max_messages: int | None
    quotas: tuple[Quota, ...]
    binds_principal: bool = False

    def covers_mailbox(self, name: str) -> bool:
        """Return whether it covers a mailbox."""
        return all(any(topic_matches(each, name) for each in patterns) for patterns in self.mailboxes)

    def covers_topic(self, topic: str) -> bool:
        """Return whether it covers a topic."""
        return all(any(topic_matches(each, topic) for each in patterns) for patterns in self.topics)

    @property
    def covers_all_topics(self) -> bool:
        """Return whether it is not limited to topics."""
        return all(ANY in patterns for patterns in self.topics)


def verify(token: Token, secret: bytes) -> Access:
    """Return the effective rights of a token.

    Arguments:
        secret: of the root key that the identifier names.

    Raises: Unauthenticated when the token was altered, has an unknown or malformed caveat, or never expires.
    """
    verify_tag(token, secret)
    return combine(token.read_identifier(), token.read_caveats())


def combine(identifier: Identifier, caveats: Iterable[Caveat]) -> Access:
    """Return the rights of an identifier, narrowed by caveats; see `verify`."""
    rights = identifier.rights
    mailboxes, topics = [rights.mailboxes], [rights.topics]
    operations = frozenset(rights.operations)
    not_before, expires = 0, None
    max_messages: int | None = None
    quotas: list[Quota] = []
    binds_principal = False
    for caveat in caveats:
        match caveat:
            case Mailboxes(patterns):
                mailboxes.append(patterns)
            case Topics(patterns):
                topics.append(patterns)
            case Operations(names):
                operations &= frozenset(names)
            case NotBefore(at_ms):
                not_before = max(not_before, at_ms)
            case Expires(at_ms):
                expires = at_ms if expires is None else min(expires, at_ms)
            case MaxMessages(messages):
                max_messages = messages if max_messages is None else min(max_messages, messages)
            case Quota():
                quotas.append(caveat)
            case BindPrincipal():
                binds_principal = True
    if expires is None:
        raise Unauthenticated("The capability never expires; issue one with an expiry.", "malformed")
    return Access(
        key_id=identifier.key_id,
        nonce=identifier.nonce,
        principal=identifier.principal,
        epoch=identifier.epoch,
        mailboxes=tuple(mailboxes),
        topics=tuple(topics),
        operations=operations,
        not_before=not_before,
        expires=expires,
        max_messages=max_messages,
        quotas=tuple(quotas),
        binds_principal=binds_principal,
    )


def limit_to_key(access: Access, key: RootKey | None) -> Access:
    """Return rights that end at the latest when the key that signed them retires.

    Raises: Unauthenticated when that key does not exist any more.
    """
    if key is None:
        raise not_issued_here()
    if key.retire_at is None:
        return access
    return msgspec.structs.replace(access, expires=min(access.expires, key.retire_at // US_PER_MS))


def check_time(access: Access, now: int) -> None:
    """Raise Unauthenticated unless a capability is valid at `now`, ms since 1970 UTC."""
    if now >= access.expires:
        raise Unauthenticated("The capability has expired; get a new one.", "expired")
    if now < access.not_before:
        raise Unauthenticated(
            f"The capability is valid in {access.not_before - now} ms; wait, or get another one.",
            "not-yet-valid",
        )


def check_operation(access: Access, operation: Right, mailbox: str) -> None:
    """Raise Forbidden unless a capability covers an operation on a mailbox."""
    if not access.covers_mailbox(mailbox):
        raise Forbidden(f"The capability does not cover the mailbox {mailbox}; get one that does.", "mailbox")
    if operation not in access.operations:
        raise Forbidden(
            f"The capability does not cover the operation {operation}; get one that does.", "operation"
        )


def uncovered_topic() -> Forbidden:
    """Return the error for a topic, or for a message whose topic is unknown: they must not differ."""
    return Forbidden(
        "The capability does not cover this topic, or the topic of this message; get one that does.", "topic"
    )
