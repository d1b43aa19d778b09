"""Dead letters: why each died, how often it was put back, and what it was before."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from postroom.application.ingest.redrive import ORIGINAL_SUBJECT
from postroom.application.messages import NewMessage
from tests.projections.folding import folded, lived
from tests.projections.histories import POISON, START_US, Receive, Send, Settle, Step
from tests.projections.reference import fold
from tests.support.steps import Operate, Wait

REDRIVE = Operate("redrive", "shop")


def dies_again(which: int) -> list[Step]:
    """Return how a message that was put back dies, of its deliveries `which` and the next."""
    return [
        Wait(5_000),
        Receive("shop"),
        Settle("nack", which),
        Wait(5_000),
        Receive("shop"),
        Settle("nack", which + 1),
    ]


def letters(taken: Sequence[Step], size: int = 1_000) -> list[dict[str, Any]]:
    """Return the dead letters of a mailbox, as both folds tell of them."""
    logs = lived([taken])
    models = folded(logs, [size], 2)
    assert models == fold(logs)
    return models.rows["dead_letters"]


every_cut = pytest.mark.parametrize("size", [1, 2, 5, 1_000])
"""Records of a range: all in one, or dead-lettering, redrive and dead-lettering in ranges of their own."""


@every_cut
def test_a_message_that_died_once_has_no_lineage(size: int) -> None:
    (letter,) = letters(POISON, size)
    assert (letter["message_id"], letter["reason"], letter["attempt"]) == ("order-1", "max_attempts", 2)
    assert letter["last_error"] == "timeout after 1 ms"
    assert (letter["redriven"], letter["redriven_at"], letter["lineage"]) == (0, None, None)
    assert START_US < letter["first_seen"] < letter["last_seen"]


@every_cut
def test_a_message_that_was_put_back_is_no_dead_letter(size: int) -> None:
    assert letters([*POISON, REDRIVE], size) == []


@every_cut
def test_a_message_that_died_again_tells_of_every_death_before_and_of_every_redrive(size: int) -> None:
    (once,) = letters(POISON)
    (letter,) = letters([*POISON, REDRIVE, *dies_again(2), REDRIVE, *dies_again(4)], size)
    first, second = json.loads(letter["lineage"])
    assert first["at"] == once["last_seen"]
    assert (first["reason"], first["attempt"], first["last_error"]) == (
        "max_attempts",
        2,
        "timeout after 1 ms",
    )
    assert second["last_error"] == "timeout after 3 ms"
    assert first["at"] < first["redriven_at"] < second["at"] < second["redriven_at"] < letter["last_seen"]
    assert (letter["redriven"], letter["redriven_at"]) == (2, second["redriven_at"])
    assert (letter["attempt"], letter["last_error"]) == (2, "timeout after 5 ms")
    assert letter["first_seen"] == once["first_seen"]


def test_messages_that_failed_in_the_same_way_share_a_fingerprint_over_all_their_deaths() -> None:
    (before,) = letters(POISON)
    (after,) = letters([*POISON, REDRIVE, *dies_again(2)])
    assert before["last_error"] != after["last_error"]
    assert before["fingerprint"] == after["fingerprint"]


def test_a_dead_letter_keeps_the_subject_that_it_came_from() -> None:
    attrs = {ORIGINAL_SUBJECT: "orders.placed.v1"}
    ingested = Send(NewMessage(topic="shop", payload=b"x", message_id="order-1", attrs=attrs))
    (letter,) = letters([ingested, *POISON[1:]])
    assert letter["original_subject"] == "orders.placed.v1"


def test_a_dead_letter_that_came_from_no_subject_has_its_topic() -> None:
    (letter,) = letters(POISON)
    assert letter["original_subject"] == letter["topic"] == "shop"


def test_a_message_that_its_time_to_live_ended_says_so() -> None:
    sent = Send(NewMessage(topic="shop", payload=b"x", ttl_seconds=1))
    (letter,) = letters([sent, Wait(2_000), Receive("shop")])
    assert (letter["reason"], letter["attempt"], letter["last_error"]) == ("ttl_expired", 0, None)


def test_a_dead_letter_that_was_purged_is_gone() -> None:
    assert letters([*POISON, Operate("purge", "shop")]) == []
