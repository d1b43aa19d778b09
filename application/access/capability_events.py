"""Aggregates and events of capabilities, of the `eventsourcing` library (ADR 0002, 0050)."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from eventsourcing.domain import Aggregate
from eventsourcing.utils import register_topic

from postroom.domain.capability.rights import Caveat, Expires
from postroom.domain.capability.token import Identifier

ROOT_KEYS_ID = UUID("0b6a7f2e-5b0c-5f3b-8f5e-6d1c8b0a9a41")
"""Id of the one `RootKeys` aggregate."""
FIRST_EPOCH = 1
_START = datetime(1970, 1, 1, tzinfo=UTC)


class CapabilityIssued(Aggregate.Created):
    """A capability was issued; its token can't be derived from the event.

    Arguments:
        key_id: of the key that signed it, in hexadecimal.
        issued_at, expires: ms since 1970 UTC.
        caveats: the others, as text for people.
    """

    TOPIC = "CapabilityIssued"
    principal: str
    key_id: str
    epoch: int
    issued_at: int
    expires: int
    mailboxes: list[str]
    topics: list[str]
    operations: list[str]
    caveats: list[str]


class CapabilityRevoked(Aggregate.Event):
    """A capability, and whatever was attenuated from it, was revoked."""

    TOPIC = "CapabilityRevoked"

    def apply(self, aggregate: Any) -> None:
        """Note when it was revoked."""
        aggregate.revoked_at = self.timestamp


class RootKeysCreated(Aggregate.Created):
    """The service got its first root key."""

    TOPIC = "RootKeysCreated"


class RootKeyRotated(Aggregate.Event):
    """Another key signs capabilities from now on.

    Arguments:
        key_id: in hexadecimal.
        retire_at: end of the tokens that the other keys signed, µs since 1970 UTC.
    """

    TOPIC = "RootKeyRotated"
    key_id: str
    retire_at: int

    def apply(self, aggregate: Any) -> None:
        """Note the key."""
        aggregate.key_id = self.key_id


class EpochRevoked(Aggregate.Event):
    """All capabilities of an epoch and of those before it were revoked."""

    TOPIC = "EpochRevoked"
    epoch: int

    def apply(self, aggregate: Any) -> None:
        """Begin the next epoch."""
        aggregate.epoch = self.epoch + 1


class Capability(Aggregate):
    """A capability that was issued; its id is its nonce."""

    def __init__(self, principal: str, expires: int) -> None:
        self.principal = principal
        self.expires = expires
        self.revoked_at: datetime | None = None

    @classmethod
    def issue(cls, identifier: Identifier, expires: int, caveats: Sequence[Caveat]) -> "Capability":
        """Issue a capability.

        Arguments:
            expires: ms since 1970 UTC.
        """
        rights = identifier.rights
        return cls._create(
            CapabilityIssued,
            id=UUID(bytes=identifier.nonce),
            timestamp=to_datetime(identifier.issued_at * 1_000),
            principal=identifier.principal,
            key_id=identifier.key_id.hex(),
            epoch=identifier.epoch,
            issued_at=identifier.issued_at,
            expires=expires,
            mailboxes=list(rights.mailboxes),
            topics=list(rights.topics),
            operations=[str(each) for each in rights.operations],
            caveats=[repr(each) for each in caveats if not isinstance(each, Expires)],
        )

    def revoke(self, now: int) -> None:
        """Revoke it, unless it is revoked; `now` is in µs since 1970 UTC."""
        if self.revoked_at is None:
            self.trigger_event(CapabilityRevoked, timestamp=to_datetime(now))


class RootKeys(Aggregate):
    """The root keys of a service, without their secrets, and the epoch of new capabilities."""

    def __init__(self) -> None:
        self.key_id = ""
        self.epoch = FIRST_EPOCH

    @classmethod
    def create(cls, now: int) -> "RootKeys":
        """Return the aggregate before its first key; `now` is in µs since 1970 UTC."""
        return cls._create(RootKeysCreated, id=ROOT_KEYS_ID, timestamp=to_datetime(now))

    def rotate(self, key_id: str, retire_at: int, now: int) -> None:
        """Sign with another key from now on."""
        self.trigger_event(RootKeyRotated, key_id=key_id, retire_at=retire_at, timestamp=to_datetime(now))

    def revoke_epoch(self, epoch: int, now: int) -> None:
        """Revoke the capabilities of an epoch and of those before it, unless they are revoked."""
        if epoch >= self.epoch:
            self.trigger_event(EpochRevoked, epoch=epoch, timestamp=to_datetime(now))


def to_datetime(time_us: int) -> datetime:
    """Return a time in µs since 1970 UTC as a datetime."""
    return _START + timedelta(microseconds=time_us)


# The log has these names, not those of modules.
for _class in (CapabilityIssued, CapabilityRevoked, EpochRevoked, RootKeyRotated, RootKeysCreated):
    register_topic(_class.TOPIC, _class)
