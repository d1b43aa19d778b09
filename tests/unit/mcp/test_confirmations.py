"""The tokens of previews: whose they are, what they are of, and how long."""

from typing import Any, cast

import pytest

from postroom.adapters.key_rings import MemoryKeyRing
from postroom.adapters.mcp.commands import LIFETIME_SECONDS, Confirmations, Preview, StalePreview
from postroom.adapters.mcp.settings import McpSources
from postroom.adapters.mcp.tools import Call
from postroom.application.service import UNRESTRICTED, Session
from postroom.domain.capability.token import KEY_ID_BYTES, SECRET_BYTES, RootKey
from postroom.domain.errors import InvalidRequest

ARGUMENTS = {"topic": "orders"}
PREVIEW = Preview({}, [1, "digest"], 7)
SECOND_US = 1_000_000


def caller(keys: MemoryKeyRing | None = None, mailbox: str = "main@local") -> Call:
    session = cast(Any, Session)(None, None, None, None, UNRESTRICTED)
    return Call(session, cast(Any, None), McpSources(mailbox=mailbox, keys=keys))


def rotate(keys: MemoryKeyRing, number: int, created_at: int, retire_at: int) -> None:
    secret = bytes([number]) * SECRET_BYTES
    keys.rotate(RootKey(bytes([number]) * KEY_ID_BYTES, secret, created_at), retire_at)


class Clock:
    now = 100.5

    def __call__(self) -> float:
        return self.now


async def test_a_token_is_valid_for_ten_minutes_and_without_keys_in_its_process_only() -> None:
    clock, call = Clock(), caller()
    confirmations = Confirmations(clock)
    text = (await confirmations.issue(call, "pause_topic", ARGUMENTS, PREVIEW)).encode()
    clock.now += LIFETIME_SECONDS - 1
    confirmed = await confirmations.check(call, "pause_topic", ARGUMENTS, text)
    assert confirmed.token.until == 7
    confirmed.check_selection(PREVIEW)
    with pytest.raises(StalePreview, match="nothing was changed"):
        confirmed.check_selection(Preview({}, [2, "digest"], 7))
    with pytest.raises(InvalidRequest, match="no preview"):
        await Confirmations(clock).check(call, "pause_topic", ARGUMENTS, text)
    clock.now += 2
    with pytest.raises(StalePreview, match="10 minutes"):
        await confirmations.check(call, "pause_topic", ARGUMENTS, text)


async def test_every_process_with_the_keys_of_the_store_accepts_a_token_for_the_same_mailbox() -> None:
    clock, keys = Clock(), MemoryKeyRing()
    rotate(keys, 1, 0, 0)
    text = (await Confirmations(clock).issue(caller(keys), "pause_topic", ARGUMENTS, PREVIEW)).encode()
    other = Confirmations(clock)
    (await other.check(caller(keys), "pause_topic", ARGUMENTS, text)).check_selection(PREVIEW)
    for call in (caller(keys, "other@local"), caller(MemoryKeyRing()), caller()):
        with pytest.raises(InvalidRequest, match="no preview"):
            await other.check(call, "pause_topic", ARGUMENTS, text)


async def test_a_token_stays_valid_after_a_rotation_until_its_key_retires() -> None:
    clock, keys = Clock(), MemoryKeyRing()
    rotate(keys, 1, 0, 0)
    confirmations = Confirmations(clock)
    text = (await confirmations.issue(caller(keys), "pause_topic", ARGUMENTS, PREVIEW)).encode()
    rotate(keys, 2, 1, 200 * SECOND_US)
    (await confirmations.check(caller(keys), "pause_topic", ARGUMENTS, text)).check_selection(PREVIEW)
    clock.now = 200.0
    with pytest.raises(InvalidRequest, match="no preview"):
        await confirmations.check(caller(keys), "pause_topic", ARGUMENTS, text)


@pytest.mark.parametrize("text", ["", "x", "é", "A" * 64, "A" * 255, "====", "\0"])
async def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="no preview"):
        await Confirmations().check(caller(), "pause_topic", ARGUMENTS, text)


async def test_no_number_of_a_token_can_be_changed() -> None:
    confirmations, call = Confirmations(), caller()
    token = await confirmations.issue(call, "pause_topic", ARGUMENTS, Preview({}, True))
    for forged in (token._replace(expires=token.expires + 1), token._replace(until=1)):
        with pytest.raises(InvalidRequest, match="no preview"):
            await confirmations.check(call, "pause_topic", ARGUMENTS, forged.encode())
