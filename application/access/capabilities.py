"""`Capabilities`: issue and revoke capabilities, rotate the keys that sign them (svc-mailbox I-8, I-15)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from secrets import token_bytes
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from eventsourcing.application import AggregateNotFoundError, Application
from eventsourcing.persistence import ApplicationRecorder, IntegrityError, PersistenceError
from eventsourcing.utils import Environment, EnvType

from postroom.application.access.authority import KeyRing, Revocations, signing_key
from postroom.application.access.capability_events import (
    ROOT_KEYS_ID,
    Capability,
    CapabilityIssued,
    CapabilityRevoked,
    EpochRevoked,
    RootKeys,
)
from postroom.domain.arguments import check_int, check_type
from postroom.domain.capability.rights import Caveat, Expires, Rights
from postroom.domain.capability.token import (
    KEY_ID_BYTES,
    NONCE_BYTES,
    SECRET_BYTES,
    Identifier,
    RootKey,
    mint,
)
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.policy import DAY_MS

DEFAULT_LIFETIME_MS = DAY_MS
MAX_LIFETIME_MS = 366 * DAY_MS
DEFAULT_OVERLAP_MS = 7 * DAY_MS
PAGE = 500
ATTEMPTS = 5

T = TypeVar("T")


class IssuedCapability(msgspec.Struct, frozen=True, kw_only=True):
    """A capability as it was issued; it can't be used without its token, which is not stored.

    Arguments:
        nonce: in hexadecimal.
        issued_at, expires: ms since 1970 UTC.
        revoked_at: the same; None while it is not revoked.
    """

    nonce: str
    principal: str
    key_id: str
    epoch: int
    issued_at: int
    expires: int
    mailboxes: list[str]
    topics: list[str]
    operations: list[str]
    caveats: list[str]
    revoked_at: int | None = None


class Capabilities(Application[UUID]):
    """The capabilities of a service; calls block and may come from any thread.

    Each raises Unavailable when the log or the keys can't be used.

    Arguments:
        recorder: of the log of capabilities.
        wall: the wall clock in µs since 1970 UTC.
    """

    def __init__(self, recorder: ApplicationRecorder, keys: KeyRing, wall: Callable[[], int]) -> None:
        self._log_recorder = recorder
        self._keys = keys
        self._wall = wall
        super().__init__()

    def construct_env(self, name: str, env: EnvType | None = None) -> Environment:
        """Return no settings: the process's environment variables are for other applications."""
        return Environment(name, {})

    def construct_recorder(self) -> ApplicationRecorder:
        """Return the recorder of the log."""
        return self._log_recorder

    def issue(
        self,
        principal: str,
        rights: Rights | None = None,
        caveats: Sequence[Caveat] = (),
        *,
        lifetime_ms: int = DEFAULT_LIFETIME_MS,
    ) -> str:
        """Issue a capability, and return the text of its token, which is stored nowhere.

        Arguments:
            principal: name of whom it is issued to.
            rights: all by default.
            lifetime_ms: until it expires; up to 366 days.

        Raises: InvalidRequest for malformed arguments, or when there is no key.
        """
        now = self._wall() // 1_000
        expires = now + check_int("lifetime_ms", lifetime_ms, 1, MAX_LIFETIME_MS)
        for each in caveats:
            if isinstance(each, Expires):
                expires = min(expires, check_int("expires", each.at_ms))
        others = [each for each in caveats if not isinstance(each, Expires)]
        with _persistence_errors():
            key, epoch = self._signing_key(), self._root_keys().epoch
            identifier = Identifier(
                key_id=key.id,
                nonce=token_bytes(NONCE_BYTES),
                principal=principal,
                epoch=epoch,
                issued_at=now,
                rights=Rights() if rights is None else check_type("rights", rights, Rights),
            )
            token = mint(identifier, key.secret, [Expires(expires), *others]).encode()
            self.save(Capability.issue(identifier, expires, others))
        return token

    def revoke(self, nonce: bytes) -> None:
        """Revoke a capability, and whatever was attenuated from it; idempotent.

        Raises: NotFound when no capability of this nonce was issued.
        """
        if len(check_type("nonce", nonce, bytes)) != NONCE_BYTES:
            raise InvalidRequest(f"A nonce has {NONCE_BYTES} bytes; it had {len(nonce)}.")

        def revoke() -> None:
            try:
                capability: Capability = self.repository.get(UUID(bytes=nonce))
            except AggregateNotFoundError:
                capability = None  # type: ignore[assignment] # refused below
            if not isinstance(capability, Capability):
                raise NotFound(f"No capability has the nonce {nonce.hex()}; list them to see those issued.")
            capability.revoke(self._wall())
            self.save(capability)

        self._repeat(revoke)

    def revoke_epoch(self, epoch: int | None = None) -> int:
        """Revoke all capabilities that were issued up to now, or in an epoch and those before it.

        Arguments:
            epoch: None for the current one.

        Returns: the epoch of capabilities that are issued from now on.
        Raises: InvalidRequest for an epoch that has not begun.
        """

        def revoke() -> int:
            root_keys = self._root_keys()
            last = root_keys.epoch if epoch is None else check_int("epoch", epoch)
            if last > root_keys.epoch:
                raise InvalidRequest(f"The epoch is {root_keys.epoch}; {last} has not begun.")
            root_keys.revoke_epoch(last, self._wall())
            self.save(root_keys)
            return root_keys.epoch

        return self._repeat(revoke)

    def rotate(self, overlap_ms: int = DEFAULT_OVERLAP_MS) -> str:
        """Sign capabilities with a new key from now on, and return its id in hexadecimal.

        Arguments:
            overlap_ms: how long tokens signed by the other keys stay valid, up to 366 days.
        """
        check_int("overlap_ms", overlap_ms, 0, MAX_LIFETIME_MS)
        now = self._wall()
        newest = signing_key(self._keys.root_keys())
        created_at = now if newest is None else max(now, newest.created_at + 1)
        key = RootKey(token_bytes(KEY_ID_BYTES), token_bytes(SECRET_BYTES), created_at)
        retire_at = now + overlap_ms * 1_000
        self._keys.rotate(key, retire_at)

        def record() -> None:
            root_keys = self._root_keys()
            root_keys.rotate(key.id.hex(), retire_at, now)
            self.save(root_keys)

        self._repeat(record)
        return key.id.hex()

    def list(self) -> list[IssuedCapability]:
        """Return the capabilities that were issued, oldest first."""
        issued: dict[UUID, IssuedCapability] = {}
        epoch = 0
        with _persistence_errors():
            for _, event in self._events(0):
                if isinstance(event, CapabilityIssued):
                    issued[event.originator_id] = _describe(event)
                elif isinstance(event, CapabilityRevoked):
                    _mark(issued, event.originator_id, event)
                elif isinstance(event, EpochRevoked) and event.epoch >= epoch:
                    for id_ in [id_ for id_, each in issued.items() if epoch <= each.epoch <= event.epoch]:
                        _mark(issued, id_, event)
                    epoch = event.epoch + 1
        return [*issued.values()]

    def read_revocations(self, revocations: Revocations) -> None:
        """Add what was revoked; see `RevocationLog.read_revocations`."""
        with _persistence_errors():
            for position, event in self._events(revocations.position):
                if isinstance(event, CapabilityRevoked):
                    capability: Capability = self.repository.get(event.originator_id)
                    revocations.add_nonce(event.originator_id.bytes, capability.expires)
                elif isinstance(event, EpochRevoked):
                    revocations.add_epoch(event.epoch)
                revocations.position = position

    def _events(self, after: int) -> Iterator[tuple[int, Any]]:
        while True:
            page = self.recorder.select_notifications(after, PAGE, inclusive_of_start=False)
            for notification in page:
                after = notification.id
                yield after, self.mapper.to_domain_event(notification)
            if len(page) < PAGE:
                return

    def _signing_key(self) -> RootKey:
        key = signing_key(self._keys.root_keys())
        if key is None:
            raise InvalidRequest(
                "There is no key to sign capabilities with; run postroom token rotate first."
            )
        return key

    def _root_keys(self) -> RootKeys:
        try:
            root_keys: RootKeys = self.repository.get(ROOT_KEYS_ID)
        except AggregateNotFoundError:
            return RootKeys.create(self._wall())
        return root_keys

    def _repeat(self, change: Callable[[], T]) -> T:
        """Make a change; another process may record one of the same aggregate meanwhile."""
        with _persistence_errors():
            for _ in range(ATTEMPTS - 1):
                try:
                    return change()
                except IntegrityError:
                    continue
            return change()


def _describe(event: CapabilityIssued) -> IssuedCapability:
    return IssuedCapability(
        nonce=event.originator_id.hex,
        principal=event.principal,
        key_id=event.key_id,
        epoch=event.epoch,
        issued_at=event.issued_at,
        expires=event.expires,
        mailboxes=event.mailboxes,
        topics=event.topics,
        operations=event.operations,
        caveats=event.caveats,
    )


def _mark(issued: dict[UUID, IssuedCapability], id_: UUID, event: Any) -> None:
    if id_ in issued and issued[id_].revoked_at is None:
        at = int(event.timestamp.timestamp() * 1_000)
        issued[id_] = msgspec.structs.replace(issued[id_], revoked_at=at)


@contextmanager
def _persistence_errors() -> Iterator[None]:
    try:
        yield
    except PersistenceError as error:
        raise Unavailable(f"The log of capabilities can't be used: {error}") from error
