"""Schedules: their changes, and the ticks that are sent and left out."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.application.cron import LATE_US, MAX_TICKS, due_ticks, ticks_of
from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.mailbox.commands import (
    DeleteSchedule,
    PauseSchedule,
    ResumeSchedule,
    RunSchedule,
    SetSchedule,
)
from postroom.domain.message import MS, MessageSent
from postroom.domain.policy import TopicPolicy
from postroom.domain.schedule import (
    MAX_PAYLOAD_BYTES,
    Missed,
    Schedule,
    ScheduleDeleted,
    SchedulePaused,
    ScheduleRan,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSpec,
)
from postroom.domain.subject import SubjectPolicy
from postroom.domain.subscription import SetSubscription, SubscriptionFilter
from tests.unit.domain.scenario import Life
from tests.unit.domain.test_subscriptions import Scene, stream_of

SECOND = 1_000_000
MINUTE, HOUR, YEAR = 60 * SECOND, 3_600 * SECOND, 366 * 86_400 * SECOND
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SPEC = ScheduleSpec("reports", every_ms=1_000)
CODE = msgspec.structs.replace(SPEC, every_ms=5_000)


def set_(spec: ScheduleSpec = SPEC, name: str = "s", *, from_code: bool = False) -> SetSchedule:
    return SetSchedule(name, spec, stream_of(name), from_code)


def scene_with_schedule() -> Scene:
    scene = Scene()
    scene.do(set_(), at=10)
    return scene


def schedule_of(scene: Scene) -> Schedule:
    return scene.mailbox.schedules["s"]


def tick(scene: Scene, number: int, at: int, *, version: int | None = None) -> RunSchedule:
    """Return the command of the tick at `at` ms."""
    send = Life(f"m{number}", topic="reports").send()
    schedule = schedule_of(scene)
    return RunSchedule("s", send, schedule.stream, version or schedule.version, at * MS)


def test_a_schedule_is_set_once_and_changed() -> None:
    scene = Scene()
    assert scene.do(set_(), at=10) == [ScheduleSet(stream_of("s"), 1, 10 * MS, "s", SPEC)]
    assert scene.do(set_(), at=20) == []
    louder = msgspec.structs.replace(SPEC, payload=b"!")
    assert scene.do(set_(louder), at=30) == [ScheduleSet(stream_of("s"), 2, 30 * MS, "s", louder)]
    assert (schedule_of(scene).anchor, schedule_of(scene).through) == (10 * MS, 10 * MS)  # the same times
    scene.do(set_(CODE), at=40)
    assert (schedule_of(scene).anchor, schedule_of(scene).through) == (40 * MS, 40 * MS)


def test_what_an_operator_changed_stays_until_the_code_changes() -> None:
    scene = Scene()
    scene.do(set_(CODE, from_code=True))
    scene.do(set_(SPEC))
    assert scene.do(set_(CODE, from_code=True)) == []
    assert schedule_of(scene).spec == SPEC
    newer = msgspec.structs.replace(CODE, every_ms=7_000)
    assert len(scene.do(set_(newer, from_code=True))) == 1
    assert schedule_of(scene).spec == newer


def test_code_that_finds_the_schedule_of_an_operator_changes_it_once() -> None:
    scene = Scene()
    scene.do(set_(SPEC))
    assert len(scene.do(set_(CODE, from_code=True))) == 1
    scene.do(set_(SPEC))
    assert scene.do(set_(CODE, from_code=True)) == []


def test_a_tick_is_marked_as_done_in_the_commit_of_its_message() -> None:
    scene = scene_with_schedule()
    message, ran = scene.do(tick(scene, 1, 1_010), at=1_010)
    assert isinstance(message, MessageSent)
    assert ran == ScheduleRan(stream_of("s"), 2, 1_010 * MS, "s", 1_010 * MS, message.stream)
    schedule = schedule_of(scene)
    assert (schedule.runs, schedule.last_run, schedule.last_message) == (1, 1_010 * MS, message.stream)


def test_no_tick_is_sent_early_twice_or_for_another_version() -> None:
    scene = scene_with_schedule()
    assert scene.do(tick(scene, 1, 1_010), at=1_009) == []
    assert len(scene.do(tick(scene, 1, 1_010), at=1_010)) == 2
    assert scene.do(tick(scene, 2, 1_010)) == []
    assert scene.do(tick(scene, 3, 2_010, version=1), at=2_010) == []
    replaced = tick(scene, 4, 2_010)
    scene.do(DeleteSchedule("s"))
    scene.do(SetSchedule("s", SPEC, stream_of("other")), at=2_010)
    assert scene.do(replaced) == []


def test_a_paused_schedule_sends_no_ticks_and_leaves_them_out_when_it_is_resumed() -> None:
    scene = scene_with_schedule()
    assert [type(each) for each in scene.do(PauseSchedule("s", "me"))] == [SchedulePaused]
    assert scene.do(PauseSchedule("s")) == []
    assert scene.do(tick(scene, 1, 1_010), at=5_000) == []
    scene.do(set_(msgspec.structs.replace(SPEC, payload=b"!")))
    assert schedule_of(scene).is_paused
    assert [type(each) for each in scene.do(ResumeSchedule("s"), at=5_500)] == [ScheduleResumed]
    assert scene.do(ResumeSchedule("s")) == []
    assert (schedule_of(scene).through, schedule_of(scene).anchor) == (5_500 * MS, 10 * MS)


def test_a_schedule_runs_besides_its_ticks_also_while_it_is_paused() -> None:
    scene = scene_with_schedule()
    scene.do(PauseSchedule("s"))
    send = Life("m", topic="reports").send()
    _, ran = scene.do(RunSchedule("s", send, principal="me"), at=500)
    assert ran == ScheduleRan(stream_of("s"), 3, 500 * MS, "s", 10 * MS, send.message, "me")
    assert (schedule_of(scene).runs, schedule_of(scene).through) == (1, 10 * MS)


def test_a_tick_that_finds_no_room_is_not_marked_as_done() -> None:
    scene = Scene(("reports", TopicPolicy(shards=1, shard_capacity=1)))
    scene.do(set_(), at=10)
    scene.do(tick(scene, 1, 1_010), at=1_010)
    with pytest.raises(Saturated):
        scene.do(tick(scene, 2, 2_010), at=2_010)
    assert schedule_of(scene).through == 1_010 * MS


def test_ticks_are_left_out_without_a_message() -> None:
    scene = scene_with_schedule()
    (ran,) = scene.do(RunSchedule("s", None, stream_of("s"), 1, 9_000 * MS), at=9_000)
    assert ran == ScheduleRan(stream_of("s"), 2, 9_000 * MS, "s", 9_000 * MS)
    assert (schedule_of(scene).through, schedule_of(scene).runs) == (9_000 * MS, 0)


def test_copies_for_subscriptions_are_in_the_commit_of_the_tick() -> None:
    scene = scene_with_schedule()
    scene.do(SetSubscription("mail", SubscriptionFilter(("reports",)), stream_of("mail")))
    send = scene.send("reports")
    events = scene.do(RunSchedule("s", send, schedule_of(scene).stream, 1, 1_010 * MS), at=1_010)
    assert [type(each) for each in events] == [MessageSent, MessageSent, ScheduleRan]


def test_a_schedule_is_deleted_and_unknown_ones_are_refused_by_name() -> None:
    scene = scene_with_schedule()
    assert scene.do(DeleteSchedule("s", "me")) == [ScheduleDeleted(stream_of("s"), 2, 10 * MS, "s", "me")]
    for command in (DeleteSchedule("s"), PauseSchedule("s"), ResumeSchedule("s"), RunSchedule("s", None)):
        with pytest.raises(NotFound, match="has no schedule s"):
            scene.do(command)


def test_the_topic_of_a_subscription_is_refused() -> None:
    scene = Scene()
    scene.do(SetSubscription("reports", SubscriptionFilter(("orders",)), stream_of("reports")))
    with pytest.raises(InvalidRequest, match="queue of subscription reports"):
        scene.do(set_())


def test_a_mailbox_has_a_limit_of_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroom.domain.mailbox.schedule_decisions.MAX_SCHEDULES", 1)
    scene = scene_with_schedule()
    with pytest.raises(Saturated, match="limit of 1 schedules"):
        scene.do(set_(SPEC, "other"))
    assert len(scene.do(set_(CODE))) == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"topic": "a b"}, "Topic"),
        ({"topic": "$members"}, "is reserved"),
        ({"every_ms": None}, "either a cron expression or an interval"),
        ({"cron": "* * * * *"}, "either a cron expression or an interval"),
        ({"every_ms": 999}, "every_ms must be at least 1000"),
        ({"every_ms": True}, "every_ms must be of type int"),
        ({"every_ms": None, "cron": b"* * * * *"}, "cron must be of type str"),
        ({"every_ms": None, "cron": "* * * * *\n"}, "no control characters"),
        ({"timezone": "Europe/Madrid"}, "An interval has no time zone"),
        ({"timezone": None}, "timezone must be of type str"),
        ({"missed": "some"}, "missed must be one of skip, last, all"),
        ({"payload": "text"}, "payload must be of type bytes"),
        ({"payload": bytes(MAX_PAYLOAD_BYTES + 1)}, "at most 16384 bytes"),
        ({"headers": [("a", "b")]}, "must be of type dict"),
        ({"headers": {"a": 1}}, "The value of header a must be of type str"),
        ({"headers": {"schedule": "x"}}, "has its own header schedule"),
        ({"headers": dict.fromkeys(map(str, range(101)), "")}, "at most 100 headers"),
        ({"content_type": 1}, "content_type must be of type str"),
        ({"sticky_key": b"k"}, "sticky_key must be of type str"),
        ({"priority": 11}, "priority must be at most 10"),
    ],
)
def test_each_field_of_a_wrong_type_or_out_of_bounds_is_named(changes: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        msgspec.structs.replace(SPEC, **changes).validate()


# -- ticks ---


def us(text: str) -> int:
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


def shown(ticks: list[int], zone: timedelta = timedelta()) -> list[str]:
    return [f"{EPOCH + timedelta(microseconds=each) + zone:%d %H:%M}" for each in ticks]


@pytest.mark.parametrize(
    ("cron", "before", "ticks"),
    [  # of Madrid, in UTC: at 01:00, 02:00 became 03:00 in March, and 03:00 became 02:00 in October
        ("30 2 * * *", "2026-03-28T02:00+00:00", ["29 01:00", "30 00:30"]),
        ("30 2 * * *", "2026-10-24T12:00+00:00", ["25 00:30", "26 01:30"]),
        ("*/30 * * * *", "2026-03-29T00:30+00:00", ["29 01:00", "29 01:30"]),
        ("*/30 * * * *", "2026-10-25T00:00+00:00", ["25 00:30", "25 01:00", "25 01:30", "25 02:00"]),
        ("0 4 * * *", "2026-03-28T12:00+00:00", ["29 02:00", "30 02:00"]),
    ],
)
def test_a_fixed_time_ticks_once_on_the_days_when_the_clock_changes(
    cron: str, before: str, ticks: list[str]
) -> None:
    next_tick = ticks_of(ScheduleSpec("t", cron, "Europe/Madrid"), 0)
    found, at = [], us(before)
    for _ in ticks:
        following = next_tick(at)
        assert following is not None
        found.append(at := following)
    assert shown(found) == ticks


specs = st.one_of(
    st.builds(
        ScheduleSpec,
        st.just("t"),
        st.sampled_from(
            ["* * * * *", "*/7 * * * *", "30 2 * * *", "*/30 1-3 * * 0", "0 0 29 2 *", "*/20 * * * * *"]
        ),
        st.sampled_from(["UTC", "Europe/Madrid", "America/New_York", "Australia/Lord_Howe"]),
    ),
    st.builds(ScheduleSpec, st.just("t"), every_ms=st.integers(1_000, 10_000_000)),
)
START = us("2026-03-28T00:00+00:00")
times = st.integers(START, START + YEAR)


@given(specs, times, st.lists(st.integers(0, 3 * HOUR), max_size=20))
def test_each_tick_is_sent_once_and_never_early_however_often_an_owner_restarts(
    spec: ScheduleSpec, start: int, pauses: list[int]
) -> None:
    """Owners look at arbitrary times, and compute the ticks anew from what the log has."""
    spec = msgspec.structs.replace(spec, missed="all")
    through = now = start
    sent: list[int] = []
    for pause in pauses:
        now += pause
        due = due_ticks(spec, ticks_of(spec, start), through, now)
        assert all(through < each <= now for each in due)
        if len(due) == MAX_TICKS:
            return
        sent += due
        through = due[-1] if due else through
    expected, next_tick = [], ticks_of(spec, start)
    following = next_tick(start)
    while following is not None and following <= now:
        expected.append(following)
        following = next_tick(following)
    assert sent == expected


@given(specs, times, st.integers(0, 2 * HOUR))
def test_of_missed_ticks_the_last_one_is_sent_or_none_that_is_late(
    spec: ScheduleSpec, start: int, outage: int
) -> None:
    def due(missed: Missed) -> list[int]:
        changed = msgspec.structs.replace(spec, missed=missed)
        return due_ticks(changed, ticks_of(spec, start), start, start + outage)

    assert due("last") == due("all")[-1:]
    assert due("skip") == [each for each in due("last") if start + outage - each <= LATE_US]


@settings(max_examples=15)
@given(specs, st.integers(1, 100))
def test_a_clock_that_jumps_by_years_leaves_all_but_the_last_ticks_out(
    spec: ScheduleSpec, years: int
) -> None:
    asked = 0
    following = ticks_of(spec, START)

    def next_tick(after: int) -> int | None:
        nonlocal asked
        asked += 1
        assert asked < 20_000
        return following(after)

    now = START + years * YEAR
    due = due_ticks(msgspec.structs.replace(spec, missed="all"), next_tick, START, now)
    assert len(due) <= MAX_TICKS
    assert due == sorted(set(due))
    last = following(due[-1]) if due else following(START)
    assert last is None or last > now


def test_a_topic_that_is_encrypted_since_is_refused_by_the_tick() -> None:
    scene = scene_with_schedule()
    scene.mailbox.settings = msgspec.structs.replace(
        scene.mailbox.settings, subject_policies={"reports": SubjectPolicy("principal")}
    )
    with pytest.raises(InvalidRequest, match="payload of a schedule in the clear"):
        scene.do(tick(scene, 1, 1_010), at=1_010)
    with pytest.raises(InvalidRequest, match="payload of a schedule in the clear"):
        scene.do(set_(CODE))
