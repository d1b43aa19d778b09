"""Idempotency keys and message ids: what makes two sends the same message, on every store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.messages import Sent
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import IdempotencyConflict, WrongMode
from postroom.domain.integrity import payload_hash
from postroom.domain.policy import MailboxLimits
from tests.support.stores import MAILBOX, envelope, memory_place, message


@pytest_asyncio.fixture
async def archive(store: str) -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox(store, MAILBOX, mode="archive", durability="relaxed") as opened:
        yield opened


async def test_a_repeated_key_answers_with_the_own_id_of_the_first_message(mailbox: OwnedMailbox) -> None:
    first = await mailbox.send_message(message(message_id="own-1", idem_key="kk"))
    assert first == Sent("own-1", duplicate=False)
    assert await mailbox.send_message(message(idem_key="kk")) == Sent("own-1", duplicate=True)
    assert await mailbox.send_message(message(message_id="own-2", idem_key="kk")) == Sent("own-1", True)
    made, own, again = await asyncio.gather(
        mailbox.send_message(message(idem_key="made")),
        mailbox.send_message(message(message_id="own-3", idem_key="together")),
        mailbox.send_message(message(idem_key="together")),
    )
    assert (own, again) == (Sent("own-3", False), Sent("own-3", True))
    assert await mailbox.send_message(message(idem_key="made")) == Sent(made.message_id, True)


async def test_an_own_id_with_another_payload_is_a_conflict_that_shows_no_hash(mailbox: OwnedMailbox) -> None:
    await mailbox.send_message(message(b"first", message_id="own-1"))
    with pytest.raises(IdempotencyConflict) as raised:
        await mailbox.send_message(message(b"second", message_id="own-1"))
    assert raised.value.code == "E_DUPLICATE"
    assert "own-1" in str(raised.value)
    assert payload_hash(b"first").hex() not in str(raised.value)
    assert await mailbox.send_message(message(b"first", message_id="own-1")) == Sent("own-1", True)


async def test_an_own_id_with_another_payload_is_a_conflict_while_the_first_is_being_appended(
    mailbox: OwnedMailbox,
) -> None:
    first, second, conflict = await mailbox.send_batch(
        [
            message(b"first", message_id="own-1"),
            message(b"first", message_id="own-1"),
            message(b"second", message_id="own-1"),
        ]
    )
    assert (first, second) == (Sent("own-1", False), Sent("own-1", True))
    assert isinstance(conflict, IdempotencyConflict)
    results = await asyncio.gather(
        *(mailbox.send_message(message(b"%d" % n, message_id="own-2")) for n in range(10)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [Sent] + [IdempotencyConflict] * 9


async def test_an_envelope_of_the_same_id_and_another_payload_is_refused_in_every_mode_of_validation(
    archive: OwnedMailbox,
) -> None:
    assert await archive.send_envelopes([envelope("own-1")]) == [Sent("own-1", False)]
    for mode in ValidationMode:
        same, other = await archive.send_envelopes(
            [envelope("own-1"), envelope("own-1", payload=b"other")], validation=mode
        )
        assert same == Sent("own-1", True)
        assert isinstance(other, IdempotencyConflict)


async def test_an_archive_honours_idempotency_keys(archive: OwnedMailbox) -> None:
    first = await archive.send_message(message(idem_key="k"))
    assert await archive.send_message(message(idem_key="k")) == Sent(first.message_id, True)
    with pytest.raises(IdempotencyConflict, match="Idempotency key 'k'"):
        await archive.send_message(message(b"other", idem_key="k"))
    assert not (await archive.send_message(message(topic="other", idem_key="k"))).duplicate
    assert (await archive.get_backlog()).archived == 2


async def test_an_archive_remembers_its_keys_after_it_was_closed() -> None:
    place = memory_place()
    async with place.open(mode="archive") as archive:
        first = await archive.send_message(message(idem_key="k"))
    async with place.open() as archive:
        assert archive.engine.mailbox.mode == "archive"
        assert await archive.send_message(message(idem_key="k")) == Sent(first.message_id, True)
        place.clock.advance(300_000)
        assert not (await archive.send_message(message(idem_key="k"))).duplicate


async def test_a_mailbox_is_not_opened_in_another_mode_than_it_was_made_in() -> None:
    place = memory_place()
    async with place.open(mode="archive"):
        pass
    with pytest.raises(WrongMode, match=f"{MAILBOX} has the mode archive, not queue"):
        async with place.open(mode="queue"):
            pass
    queue = memory_place()
    async with queue.open():
        pass
    with pytest.raises(WrongMode, match=f"{MAILBOX} has the mode queue, not archive"):
        async with queue.open(mode="archive"):
            pass
    async with queue.open(mode="queue"):
        pass


@pytest.mark.parametrize("rounds", [1, 3])
async def test_an_own_id_may_be_sent_again_right_after_retention_removed_it(rounds: int) -> None:
    place = memory_place()
    limits = MailboxLimits(history_retention_ms=1)
    async with place.open(mode="archive", limits=limits) as archive:
        for _ in range(rounds):
            assert await archive.send_message(message(message_id="own-1")) == Sent("own-1", False)
            place.clock.advance(10)
            assert await archive.retention.enforce_age() > 0
        assert await archive.send_message(message(b"other", message_id="own-1")) == Sent("own-1", False)
        assert await archive.send_message(message(b"other", message_id="own-1")) == Sent("own-1", True)
