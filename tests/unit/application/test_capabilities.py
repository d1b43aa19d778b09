"""Issuing and revoking capabilities and rotating keys, and the log that they are recorded in."""

import pytest

from postroom.adapters.key_rings import MemoryKeyRing
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.recorder import LogRecorder
from postroom.application.access.authority import Revocations
from postroom.application.access.capabilities import Capabilities
from postroom.domain.capability.access import Access, verify
from postroom.domain.capability.rights import Expires, MaxMessages, Right, Rights
from postroom.domain.capability.token import Token
from postroom.domain.commit import GENESIS, verify_chain
from postroom.domain.errors import InvalidRequest, NotFound, Unauthenticated
from postroom.domain.names import CAPABILITY_LOG
from postroom.domain.policy import DAY_MS
from tests.support.clocks import ManualClock


class World:
    """Capabilities over a log in memory, as two processes see them."""

    def __init__(self) -> None:
        self.clock, self.keys, self.log = ManualClock(), MemoryKeyRing(), MemoryEventLog(CAPABILITY_LOG)
        self.one, self.other = self._open(), self._open()

    def _open(self) -> Capabilities:
        return Capabilities(LogRecorder(self.log, self.clock.wall), self.keys, self.clock.wall)

    def events(self) -> list[str]:
        return [record.type for record in self.log.read()]

    def access(self, token: str) -> Access:
        (key,) = [
            key for key in self.keys.root_keys() if key.id == Token.decode(token).read_identifier().key_id
        ]
        return verify(Token.decode(token), key.secret)

    def is_revoked(self, token: str) -> bool:
        revocations = Revocations()
        self.other.read_revocations(revocations)
        try:
            revocations.check(self.access(token))
        except Unauthenticated:
            return True
        return False


@pytest.fixture
def world() -> World:
    return World()


def nonce_of(token: str) -> bytes:
    return Token.decode(token).read_identifier().nonce


def test_without_a_key_nothing_is_issued(world: World) -> None:
    with pytest.raises(InvalidRequest, match="token rotate"):
        world.one.issue("shop")
    assert world.events() == []


def test_a_capability_has_the_rights_and_the_time_that_it_was_issued_with(world: World) -> None:
    world.one.rotate()
    token = world.one.issue(
        "shop", Rights(topics=("orders",), operations=(Right.SEND,)), [MaxMessages(3)], lifetime_ms=5_000
    )
    access = world.access(token)
    now = world.clock.wall() // 1_000
    assert (access.principal, access.epoch, access.max_messages) == ("shop", 1, 3)
    assert (access.topics, access.operations) == ((("orders",),), frozenset({Right.SEND}))
    assert access.expires == now + 5_000
    assert world.events() == ["RootKeysCreated", "RootKeyRotated", "CapabilityIssued"]
    (listed,) = world.other.list()
    assert (listed.nonce, listed.principal, listed.expires) == (nonce_of(token).hex(), "shop", now + 5_000)
    assert (listed.revoked_at, listed.caveats) == (None, ["MaxMessages(messages=3)"])


def test_an_expiry_among_the_caveats_is_the_one_that_is_listed(world: World) -> None:
    world.one.rotate()
    now = world.clock.wall() // 1_000
    token = world.one.issue("shop", caveats=[Expires(now + 7)], lifetime_ms=5_000)
    assert world.access(token).expires == world.one.list()[0].expires == now + 7


def test_a_capability_that_is_revoked_twice_is_revoked_once(world: World) -> None:
    world.one.rotate()
    token, untouched = world.one.issue("shop"), world.one.issue("shop")
    world.clock.advance(9)
    world.one.revoke(nonce_of(token))
    world.other.revoke(nonce_of(token))
    assert world.events()[-2:] == ["CapabilityIssued", "CapabilityRevoked"]
    assert (world.is_revoked(token), world.is_revoked(untouched)) == (True, False)
    first, second = world.other.list()
    assert (first.revoked_at, second.revoked_at) == (world.clock.wall() // 1_000, None)


@pytest.mark.parametrize(("nonce", "error"), [(bytes(16), NotFound), (b"short", InvalidRequest)], ids=repr)
def test_only_what_was_issued_can_be_revoked(world: World, nonce: bytes, error: type[Exception]) -> None:
    world.one.rotate()
    with pytest.raises(error):
        world.one.revoke(nonce)


def test_the_aggregate_of_the_keys_is_no_capability(world: World) -> None:
    world.one.rotate()
    (stream, *_) = {record.stream for record in world.log.read()}
    with pytest.raises(NotFound):
        world.one.revoke(stream)


def test_revoking_an_epoch_revokes_what_was_issued_before(world: World) -> None:
    world.one.rotate()
    before = [world.one.issue("shop") for _ in range(2)]
    assert world.one.revoke_epoch() == 2
    after = world.other.issue("shop")
    assert [world.is_revoked(each) for each in (*before, after)] == [True, True, False]
    assert [each.revoked_at is None for each in world.one.list()] == [False, False, True]
    assert world.one.revoke_epoch(1) == 2
    assert world.events().count("EpochRevoked") == 1
    with pytest.raises(InvalidRequest, match="has not begun"):
        world.one.revoke_epoch(3)
    assert not world.is_revoked(after)


def test_a_rotation_signs_with_a_new_key_and_says_when_the_others_retire(world: World) -> None:
    first = world.one.rotate()
    old = world.one.issue("shop")
    second = world.other.rotate(overlap_ms=1_000)
    new = world.one.issue("shop")
    assert [Token.decode(each).read_identifier().key_id.hex() for each in (old, new)] == [first, second]
    retire_at = [key.retire_at for key in world.keys.root_keys()]
    assert retire_at == [world.clock.wall() + 1_000_000, None]


def test_the_log_has_neither_secrets_nor_tags(world: World) -> None:
    world.one.rotate()
    token = Token.decode(world.one.issue("shop"))
    world.one.revoke_epoch()
    stored = b"".join(commit.events for commit in world.log.commits())
    for secret in (token.tag, *(key.secret for key in world.keys.root_keys())):
        assert secret not in stored
        assert secret.hex().encode() not in stored
    verify_chain(world.log.commits(), GENESIS, 1)


def test_only_live_revocations_are_remembered() -> None:
    revocations, access = Revocations(), _access()
    revocations.add_nonce(access.nonce, 100)
    revocations.forget_expired(DAY_MS + 99)
    with pytest.raises(Unauthenticated):
        revocations.check(access)
    revocations.forget_expired(DAY_MS + 100)
    revocations.check(access)


def _access() -> Access:
    world = World()
    world.one.rotate()
    return world.access(world.one.issue("shop"))
