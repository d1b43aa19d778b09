"""Taking a mailbox over: epochs, log time (svc-mailbox I-17, C-11), and what retention leaves."""

import pytest

from postroom.domain.mailbox.commands import Sweep, TakeOwnership, Truncate
from postroom.domain.mailbox.events import LogTruncated, MailboxCreated, OwnershipTaken
from postroom.domain.mailbox.logtime import SKEW_TOLERANCE, Anchor, anchor
from postroom.domain.mailbox.state import Clock
from postroom.domain.names import mailbox_stream
from tests.unit.domain.scenario import BOOT, NAME, NOTHING, Life, given, taken_over

MINUTE = 60_000_000
OWN = mailbox_stream(NAME)


def take(*, continues: bool = False, uptime: int = 0) -> TakeOwnership:
    return TakeOwnership(NAME, "queue", "process 1", BOOT, uptime, continues)


# -- epochs ---


def test_the_first_owner_makes_the_mailbox() -> None:
    created = MailboxCreated(OWN, 1, 5_000, NAME, "queue")
    taken = OwnershipTaken(OWN, 2, 5_000, 1, "process 1", BOOT, 0, False)
    given(NOTHING, before=NOTHING).when(take(), at=5).then([created, taken])


def test_every_owner_gets_a_higher_epoch() -> None:
    scenario = given([taken_over(epoch=2, version=3, at=1)])
    scenario = scenario.when(take(continues=True, uptime=7), at=2).then(
        [OwnershipTaken(OWN, 4, 2_000, 3, "process 1", BOOT, 7, True)]
    )
    assert (scenario.mailbox.epoch, scenario.mailbox.owner) == (3, "process 1")
    assert scenario.mailbox.clock == Clock(BOOT, 7, 2_000)


def test_receipts_carry_the_epoch_that_delivered() -> None:
    a = Life("a", epoch=2)
    scenario = given([a.sent(at=0), taken_over(epoch=2, version=3, at=1), a.received(at=2)])
    assert scenario.mailbox.messages[a.stream].receipt == a.receipt
    assert a.receipt.epoch == 2


# -- deadlines across a restart ---


def test_deadlines_stay_what_they_were_when_log_time_goes_on() -> None:
    a = Life("a")
    scenario = given(
        [a.sent(at=0), a.received(at=0), taken_over(epoch=2, version=3, at=4_000, continues=True)]
    )
    scenario.when(Sweep(), at=4_999).then_nothing_happens()
    scenario.when(Sweep(), at=5_000).then([a.timed_out(at=5_000)])


def test_messages_in_flight_get_their_full_visibility_again_when_log_time_started_anew() -> None:
    a, b = Life("a"), Life("b")
    past = [a.sent(at=0), b.sent(at=0), a.received(at=0), b.received(at=0, visibility=60_000)]
    scenario = given([*past, taken_over(epoch=2, version=3, at=4_000)])
    scenario.when(Sweep(), at=8_999).then_nothing_happens()
    scenario = scenario.when(Sweep(), at=9_000).then([a.timed_out(at=9_000)])
    scenario.when(Sweep(), at=64_000).then([b.timed_out(at=64_000)])


# -- log time ---

LAST = Clock(BOOT, uptime=50 * MINUTE, at=1_000 * MINUTE)


def test_the_first_owner_starts_log_time_at_the_wall_clock() -> None:
    assert anchor(None, 0, wall=7, boot=BOOT, uptime=1) == Anchor(7, continues=False)


@pytest.mark.parametrize("skew", [-SKEW_TOLERANCE, -1, 0, 1, SKEW_TOLERANCE])
def test_on_the_same_boot_log_time_goes_on_by_the_monotonic_clock_whatever_the_wall_says(skew: int) -> None:
    wall = 1_010 * MINUTE + skew
    assert anchor(LAST, LAST.at, wall=wall, boot=BOOT, uptime=60 * MINUTE) == Anchor(
        1_010 * MINUTE, continues=True
    )


def test_two_minutes_of_skew_are_tolerated() -> None:
    assert SKEW_TOLERANCE >= 2 * MINUTE


@pytest.mark.parametrize("skew", [-SKEW_TOLERANCE - 1, SKEW_TOLERANCE + 1])
def test_a_wall_clock_further_off_starts_log_time_anew_but_never_before_the_last_event(skew: int) -> None:
    wall = 1_010 * MINUTE + skew
    started = anchor(LAST, LAST.at, wall=wall, boot=BOOT, uptime=60 * MINUTE)
    assert started == Anchor(max(wall, LAST.at), continues=False)
    assert anchor(LAST, LAST.at, wall=1, boot=BOOT, uptime=60 * MINUTE) == Anchor(LAST.at, continues=False)


def test_after_a_reboot_log_time_starts_at_the_wall_clock() -> None:
    wall = 1_002 * MINUTE
    assert anchor(LAST, LAST.at, wall=wall, boot="another", uptime=60 * MINUTE) == Anchor(
        wall, continues=False
    )


def test_an_uptime_that_went_back_counts_as_a_reboot() -> None:
    wall = 1_002 * MINUTE
    assert anchor(LAST, LAST.at, wall=wall, boot=BOOT, uptime=49 * MINUTE) == Anchor(wall, continues=False)


def test_log_time_is_never_before_the_last_event() -> None:
    ahead = LAST.at + 20 * MINUTE
    assert anchor(LAST, ahead, wall=1_010 * MINUTE, boot=BOOT, uptime=60 * MINUTE) == Anchor(
        ahead, continues=False
    )


# -- truncation ---


def test_a_truncation_is_recorded_once() -> None:
    event = LogTruncated(OWN, 3, 9_000, 5, b"link")
    scenario = given(NOTHING).when(Truncate(5, b"link"), at=9).then([event])
    scenario.when(Truncate(5, b"link"), at=10).then_nothing_happens()
    scenario.when(Truncate(4, b"older"), at=10).then_nothing_happens()
    assert scenario.mailbox.truncated_through == 5
