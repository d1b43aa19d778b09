"""Taking a mailbox over: epochs, log time (svc-mailbox I-17, C-11), and what retention leaves."""

import pytest

from postroom.domain.errors import ImplausibleClock
from postroom.domain.mailbox.commands import Receive, Sweep, TakeOwnership, Truncate
from postroom.domain.mailbox.events import Clock, LogTruncated, MailboxCreated, OwnershipTaken
from postroom.domain.mailbox.ownership import EXPIRY_GRACE_MS, MAX_DOWNTIME, Anchor, anchor
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import DAY_MS
from postroom.domain.settings import MailboxSettings
from tests.unit.domain.scenario import BOOT, NAME, NOTHING, TOPIC, Life, given, taken_over

MINUTE = 60_000_000
DAY = 24 * 60 * MINUTE
OWN = mailbox_stream(NAME)


def take(*, continues: bool = False, uptime: int = 0) -> TakeOwnership:
    return TakeOwnership(NAME, "queue", "process 1", BOOT, uptime, continues)


# -- epochs ---


def test_the_first_owner_makes_the_mailbox() -> None:
    created = MailboxCreated(OWN, 1, 5_000, NAME, "queue", MailboxSettings())
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


def test_after_a_discontinuity_of_log_time_expiry_pauses_and_then_resumes() -> None:
    a, b = Life("a"), Life("b")
    died = [b.sent(at=0), b.received(at=0), b.dead(at=1)]
    restart = 30 * DAY_MS
    scenario = given([a.sent(at=0, ttl=1_000), *died, taken_over(epoch=2, version=3, at=restart)])
    resumes = restart + EXPIRY_GRACE_MS
    assert scenario.mailbox.next_timer() == resumes * MS
    scenario.when(Sweep(), at=resumes - 1).then_nothing_happens()
    scenario.when(Sweep(), at=resumes).then(
        [a.dead(at=resumes, reason="ttl_expired"), b.expired(at=resumes, reason="retention")]
    )


def test_expiry_does_not_pause_when_log_time_goes_on() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0, ttl=1_000), taken_over(epoch=2, version=3, at=1_000, continues=True)])
    scenario.when(Sweep(), at=1_000).then([a.dead(at=1_000, reason="ttl_expired")])


def test_a_message_past_its_ttl_is_not_delivered_while_expiry_pauses() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0, ttl=1_000), taken_over(epoch=2, version=3, at=1_000)])
    scenario.when(Receive((TOPIC,), 1, 1_000), at=1_000).then_nothing_happens()


# -- log time ---

LAST_AT = 1_000 * MINUTE
LAST_UPTIME = 50 * MINUTE


def mailbox_of_last_owner(at: int = LAST_AT) -> Mailbox:
    mailbox = Mailbox(NAME)
    mailbox.clock, mailbox.at = Clock(BOOT, LAST_UPTIME, LAST_AT), at
    return mailbox


def test_the_first_owner_starts_log_time_at_the_wall_clock() -> None:
    assert anchor(Mailbox(NAME), wall=7, boot=BOOT, uptime=1) == Anchor(7, 1, continues=False)


@pytest.mark.parametrize("skew", [-400 * DAY, -2 * MINUTE, -1, 0, 1, 2 * MINUTE, 8 * DAY, 365 * DAY])
def test_on_the_same_boot_log_time_goes_on_by_the_monotonic_clock_whatever_the_wall_says(skew: int) -> None:
    wall, uptime = 1_010 * MINUTE + skew, 60 * MINUTE
    started = anchor(mailbox_of_last_owner(), wall=wall, boot=BOOT, uptime=uptime)
    assert started == Anchor(1_010 * MINUTE, uptime, continues=True)


def test_on_the_same_boot_log_time_is_never_before_the_last_event() -> None:
    ahead = LAST_AT + 20 * MINUTE
    started = anchor(mailbox_of_last_owner(ahead), wall=1, boot=BOOT, uptime=60 * MINUTE)
    assert started == Anchor(ahead, 60 * MINUTE, continues=True)


def test_after_a_reboot_log_time_starts_at_the_wall_clock() -> None:
    wall = 1_002 * MINUTE
    started = anchor(mailbox_of_last_owner(), wall=wall, boot="another", uptime=MINUTE)
    assert started == Anchor(wall, MINUTE, continues=False)


def test_after_a_reboot_log_time_is_never_before_the_last_event() -> None:
    started = anchor(mailbox_of_last_owner(), wall=1, boot="another", uptime=MINUTE)
    assert started == Anchor(LAST_AT, MINUTE, continues=False)


def test_an_uptime_that_went_back_counts_as_a_reboot() -> None:
    wall = 1_002 * MINUTE
    started = anchor(mailbox_of_last_owner(), wall=wall, boot=BOOT, uptime=49 * MINUTE)
    assert started == Anchor(wall, 49 * MINUTE, continues=False)


@pytest.mark.parametrize("uptime", [0, MINUTE, 10 * DAY])
def test_after_a_reboot_the_wall_clock_is_believed_up_to_the_longest_downtime(uptime: int) -> None:
    wall = LAST_AT + MAX_DOWNTIME + uptime
    assert anchor(mailbox_of_last_owner(), wall=wall, boot="another", uptime=uptime).at == wall
    with pytest.raises(ImplausibleClock):
        anchor(mailbox_of_last_owner(), wall=wall + 1, boot="another", uptime=uptime)


def test_an_implausible_clock_is_named_with_the_last_record_and_the_way_out() -> None:
    with pytest.raises(
        ImplausibleClock,
        match=r"says 1970-01-09T16:40:00Z.*acme@one is of 1970-01-01T16:40:00Z.*--accept-clock",
    ):
        anchor(mailbox_of_last_owner(), wall=LAST_AT + 8 * DAY, boot="another", uptime=MINUTE)


@pytest.mark.parametrize("idle", [0, MAX_DOWNTIME, 300 * DAY])
def test_uptime_is_believed_however_long_where_the_wall_clock_is_not_far_behind_it(idle: int) -> None:
    for wall in (LAST_AT + idle - MAX_DOWNTIME, LAST_AT + idle + 365 * DAY):
        started = anchor(mailbox_of_last_owner(), wall=wall, boot=BOOT, uptime=LAST_UPTIME + idle)
        assert started == Anchor(LAST_AT + idle, LAST_UPTIME + idle, continues=True)


def test_an_uptime_far_ahead_of_the_last_record_and_the_wall_clock_is_refused() -> None:
    uptime, wall = LAST_UPTIME + 50 * 365 * DAY, LAST_AT + 8 * DAY
    with pytest.raises(ImplausibleClock, match=r"By the uptime .* clock says .*acme@one.*--accept-clock"):
        anchor(mailbox_of_last_owner(), wall=wall, boot=BOOT, uptime=uptime)
    started = anchor(mailbox_of_last_owner(), wall=wall, boot=BOOT, uptime=uptime, accept_clock=True)
    assert started.continues


def test_an_implausible_clock_can_be_accepted() -> None:
    wall = LAST_AT + 365 * DAY
    started = anchor(mailbox_of_last_owner(), wall=wall, boot="another", uptime=0, accept_clock=True)
    assert started == Anchor(wall, 0, continues=False)


# -- truncation ---


def test_a_truncation_is_recorded_once() -> None:
    event = LogTruncated(OWN, 3, 9_000, 2, b"link")
    scenario = given(NOTHING).when(Truncate(2, b"link"), at=9).then([event])
    scenario.when(Truncate(2, b"link"), at=10).then_nothing_happens()
    scenario.when(Truncate(1, b"older"), at=10).then_nothing_happens()
    assert scenario.mailbox.truncated_through == 2
