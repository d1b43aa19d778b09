"""Given what happened to a message, this is what another policy would have made of it."""

from collections.abc import Sequence

import pytest

from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import MS, ExpiryReason
from postroom.domain.message_history import MessageHistory, trace
from postroom.domain.policy import Changes, TopicPolicy
from postroom.domain.policy_simulation import FinalStatus, Outcome, observe, simulate
from postroom.domain.record import Event
from tests.unit.domain.scenario import Life, taken_over

POLICY = TopicPolicy(max_attempts=2, backoff_base_ms=200, visibility_ms=1_000)
END = 100_000


def lived(events: Sequence[Event]) -> MessageHistory:
    epoch, happenings = 1, []
    for position, event in enumerate(events, 1):
        epoch = event.epoch if isinstance(event, OwnershipTaken) else epoch
        happenings.append((position, epoch, event, POLICY))
    history = trace(happenings)  # type: ignore[arg-type]  # they are of a message, or takeovers
    assert history is not None
    return history


def under(events: Sequence[Event], end: int = END, **changes: int) -> tuple[Outcome, Outcome]:
    """Return the best and the worst under some changes; `end` in ms."""
    return simulate(lived(events), Changes(**changes), end * MS)


def outcome(
    status: FinalStatus, *, deliveries: int, queued: int, dead_letterings: int = 0, assumed: int = 0
) -> Outcome:
    """Return a outcome; `queued` in ms."""
    return Outcome(status, deliveries, dead_letterings, queued * MS, assumed)


def surely(
    status: FinalStatus, *, deliveries: int, queued: int, dead_letterings: int = 0
) -> tuple[Outcome, Outcome]:
    """Return the best and the worst where history decides."""
    certain = outcome(status, deliveries=deliveries, queued=queued, dead_letterings=dead_letterings)
    return certain, certain


def poison(m: Life) -> list[Event]:
    """Return what happens to a message that fails twice and dies of it."""
    return [
        m.sent(at=0),
        m.received(at=10),
        m.requeued(at=20, due=120),
        m.received(at=130),
        m.dead(at=140),
    ]


def test_a_message_that_died_had_less_with_fewer_attempts() -> None:
    events = poison(Life("m"))
    assert observe(lived(events), END * MS) == outcome("dead", deliveries=2, queued=140, dead_letterings=1)
    assert under(events, max_attempts=1) == surely("dead", deliveries=1, queued=20, dead_letterings=1)


def test_nobody_knows_how_attempts_end_that_a_dead_message_never_had() -> None:
    best, worst = under(poison(Life("m")), max_attempts=4)
    assert (best.status, best.deliveries, best.assumed) == ("settled", 3, 1)
    assert (worst.status, worst.deliveries, worst.dead_letterings, worst.assumed) == ("dead", 4, 1, 2)
    assert worst.queued > best.queued > 150 * MS


def test_what_the_log_ends_before_is_not_made_up() -> None:
    best, worst = under(poison(Life("m")), end=140, max_attempts=4)
    assert best == worst == outcome("waiting", deliveries=2, queued=140)


def test_a_pause_is_scaled_to_the_other_policy_and_one_of_the_consumers_own_stays() -> None:
    def nacked(due: int) -> list[Event]:
        m = Life("m")
        events = [m.sent(at=0), m.received(at=0), m.requeued(at=10, due=due), m.received(at=due + 5)]
        return [*events, m.acked(at=due + 20)]

    assert under(nacked(110), backoff_base_ms=800) == surely("settled", deliveries=2, queued=430)
    assert under(nacked(110), backoff_base_ms=100) == surely("settled", deliveries=2, queued=80)
    assert under(nacked(110), backoff_max_ms=200) == surely("settled", deliveries=2, queued=80)
    assert under(nacked(5_010), backoff_base_ms=800) == surely("settled", deliveries=2, queued=5_030)


def test_a_shorter_visibility_ends_what_took_longer_and_a_late_ack_may_still_count() -> None:
    m = Life("m")
    events = [m.sent(at=0), m.received(at=0, visibility=1_000), m.acked(at=900)]
    assert under(events, visibility_ms=901) == surely("settled", deliveries=1, queued=900)
    best, worst = under(events, visibility_ms=300)
    assert best == outcome("settled", deliveries=1, queued=900)
    assert worst == outcome("dead", deliveries=2, queued=600, dead_letterings=1, assumed=1)


def test_a_longer_visibility_may_have_let_a_delivery_succeed_that_timed_out() -> None:
    m = Life("m")
    timed_out = [m.sent(at=0), m.received(at=0, visibility=1_000), m.timed_out(at=1_000)]
    best, worst = under([*timed_out, m.received(at=1_050), m.acked(at=1_100)], visibility_ms=3_000)
    assert best == outcome("settled", deliveries=1, queued=1_000, assumed=1)
    assert worst == outcome("settled", deliveries=2, queued=3_100, assumed=1)


def test_a_late_ack_tells_how_long_the_work_took() -> None:
    m = Life("m")
    events = [m.sent(at=0), m.received(at=0, visibility=1_000), m.timed_out(at=1_000), m.acked(at=1_500)]
    assert under(events, visibility_ms=2_000) == surely("settled", deliveries=1, queued=1_500)
    assert under(events, visibility_ms=1_200) == surely("settled", deliveries=1, queued=1_500)


def test_an_extension_counts_as_long_as_it_came_in_time() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=0, visibility=1_000),
        m.extended(at=500, due=3_000),
        m.acked(at=2_500),
    ]
    assert under(events, visibility_ms=600) == surely("settled", deliveries=1, queued=2_500)
    best, worst = under(events, visibility_ms=400)
    assert best == outcome("settled", deliveries=1, queued=2_500)
    assert worst.assumed


def test_a_delivery_that_a_new_clock_hid_again_is_hidden_again_for_the_other_visibility() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=0, visibility=1_000),
        taken_over(epoch=2, version=3, at=500),
        m.timed_out(at=1_500),
        m.received(at=1_500),
        m.acked(at=1_600),
    ]
    assert under(events, visibility_ms=700) == surely("settled", deliveries=2, queued=1_300)


def test_what_came_after_a_redrive_tells_of_deliveries_from_then_on() -> None:
    m = Life("m")
    events = [*poison(m), m.redriven(at=1_000), m.received(at=1_000), m.acked(at=1_010)]
    assert observe(lived(events), END * MS) == outcome("settled", deliveries=3, queued=150, dead_letterings=1)
    best, worst = under(events, max_attempts=3)  # the third would have come before it was redriven
    assert (best.deliveries, best.dead_letterings, best.assumed) == (3, 0, 1)
    assert (worst.status, worst.deliveries, worst.dead_letterings, worst.assumed) == ("settled", 4, 1, 1)
    best, worst = under(events, max_attempts=3, backoff_base_ms=20_000)  # and here after it
    assert best == worst
    assert (best.status, best.deliveries, best.dead_letterings, best.assumed) == ("settled", 3, 0, 0)


@pytest.mark.parametrize("changes", [{"max_attempts": 9}, {"backoff_base_ms": 5}, {"visibility_ms": 9_000}])
def test_no_policy_of_retries_changes_what_was_never_delivered(changes: dict[str, int]) -> None:
    m, n, o = Life("m"), Life("n"), Life("o")
    assert under([m.sent(at=0, ttl=50), m.dead(at=60, reason="ttl_expired")], **changes) == surely(
        "dead", deliveries=0, queued=60, dead_letterings=1
    )
    assert under([n.sent(at=0), n.expired(at=70, reason="purged")], **changes) == surely(
        "removed", deliveries=0, queued=70
    )
    assert under([o.sent(at=0)], **changes) == surely("waiting", deliveries=0, queued=END)


def test_a_message_that_waits_for_longer_than_it_may_dies_of_that() -> None:
    m = Life("m")
    events = [m.sent(at=0, ttl=200), m.received(at=0), m.requeued(at=10, due=110), m.received(at=110)]
    assert under([*events, m.acked(at=120)], backoff_base_ms=800) == surely(
        "dead", deliveries=1, queued=200, dead_letterings=1
    )


def test_a_message_that_its_consumer_rejects_after_the_timeout_is_rejected_under_other_policies() -> None:
    m = Life("m")
    events = [m.sent(at=0), m.received(at=0, visibility=1_000), m.timed_out(at=1_000)]
    events += [m.dead(at=2_500, reason="rejected")]
    observed = surely("dead", deliveries=1, queued=2_500, dead_letterings=1)
    assert under(events) == under(events, visibility_ms=500) == under(events, visibility_ms=9_000) == observed
    assert under(events, max_attempts=1) == surely("dead", deliveries=1, queued=1_000, dead_letterings=1)


@pytest.mark.parametrize("reason", ["cancelled", "superseded", "erased"])
def test_a_message_that_is_removed_in_flight_is_removed_then(reason: ExpiryReason) -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=0),
        m.requeued(at=10, due=210),
        m.received(at=210, visibility=1_000),
    ]
    events += [m.expired(at=900, reason=reason)]
    assert under(events) == under(events, visibility_ms=9_000) == surely("removed", deliveries=2, queued=900)
    assert under(events, backoff_base_ms=800) == surely("removed", deliveries=2, queued=900)
    assert under(events, end=900, backoff_base_ms=1_600) == surely("removed", deliveries=1, queued=900)
    best, worst = under(events, visibility_ms=600, max_attempts=3)
    assert (best.status, best.deliveries, best.assumed) == ("removed", 3, 1)
    assert worst == best
    of_dead: FinalStatus = "removed" if reason == "erased" else "dead"  # no other removes a dead letter
    assert under(events, max_attempts=1) == surely(of_dead, deliveries=1, queued=10, dead_letterings=1)


def test_a_waiting_message_is_rescheduled_when_it_was() -> None:
    m = Life("m")
    events = [m.sent(at=0), m.received(at=0), m.requeued(at=10, due=210), m.rescheduled(at=300, due=400)]
    events += [m.received(at=405), m.acked(at=410)]
    assert under(events) == under(events, backoff_base_ms=230) == surely("settled", deliveries=2, queued=410)
    assert under(events, backoff_base_ms=9_000) == surely("settled", deliveries=2, queued=410)
    sooner = under(events, backoff_base_ms=20)  # it is delivered before
    assert sooner == surely("settled", deliveries=2, queued=40)


def test_a_redrive_that_was_undone_is_undone_under_other_policies() -> None:
    events = [*poison(m := Life("m")), m.redriven(at=1_000), m.dead(at=1_200)]
    assert observe(lived(events), END * MS) == outcome("dead", deliveries=2, queued=340, dead_letterings=2)
    assert under(events, visibility_ms=2_000) == surely("dead", deliveries=2, queued=340, dead_letterings=2)


@pytest.mark.parametrize(
    "changes",
    [{"max_attempts": 0}, {"max_attempts": 1_001}, {"backoff_base_ms": 0}, {"visibility_ms": 249}],
)
def test_changes_have_bounds(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(changes))} must be at"):
        Changes(**changes)
