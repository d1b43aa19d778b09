"""Redrive jobs of every kind keep to their model, and the model finds defects that are put into them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.redrive import jobs, selection
from postroom.domain.arguments import MAX_INT
from postroom.domain.mailbox import redrive_decisions
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.record import Event
from postroom.domain.redrive.job import UndoRedrive
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.redrive_model import (
    KINDS,
    STEPS,
    WAITING,
    WAITING_STEPS,
    changes,
    check_job,
    check_waiting_job,
)
from tests.support.redrives import NAME, add_dead_letters, ended, log_of, owned

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]
DEFECTS: list[tuple[Defect, str, Sequence[str]]] = []
"""Defects, each with a kind of job and steps that show it."""


@given(
    kind=st.sampled_from(sorted(KINDS)),
    steps=st.lists(st.sampled_from(STEPS), max_size=8),
    count=st.integers(1, 7),
    batch=st.integers(1, 3),
    receives=st.integers(0, 3),
)
def test_a_job_of_any_kind_changes_each_selected_message_once_whatever_happens(
    kind: str, steps: list[str], count: int, batch: int, receives: int
) -> None:
    asyncio.run(check_job(kind, steps, count, batch, receives))


@given(
    kind=st.sampled_from(sorted(WAITING)),
    steps=st.lists(st.sampled_from(WAITING_STEPS), max_size=8),
    count=st.integers(1, 7),
    batch=st.integers(1, 3),
)
def test_a_job_on_what_waits_changes_each_selected_message_once_whatever_happens(
    kind: str, steps: list[str], count: int, batch: int
) -> None:
    asyncio.run(check_waiting_job(kind, steps, count, batch))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_of_any_kind_survives_a_crash_after_each_of_its_commits(kind: str) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, [f"m{number}" for number in range(8)], payload=b"{}")
        await add_dead_letters(mailbox, ["mail"], topic="mail", payload=b"{}")
        before = len(list(log.commits()))
        job = await ended(mailbox, await mailbox.start_redrive(KINDS[kind]))
        commits = list(log.commits())
    assert len(commits) >= before + 4
    expected = changes(log, kind)
    assert expected.total() == len(expected) == 8
    for end in range(before + 1, len(commits) + 1):
        rest = log_of(commits[:end])
        async with owned(rest, batch=2) as mailbox:
            assert (await ended(mailbox, job)).moved == 8
        assert changes(rest, kind) == expected


def defect(*steps: str, kinds: Iterable[str] = KINDS) -> Callable[[Defect], Defect]:
    def register(put_in: Defect) -> Defect:
        DEFECTS.extend((put_in, kind, steps) for kind in kinds)
        return put_in

    return register


@defect("work")
def a_message_that_is_skipped(patch: Patch) -> None:
    take = jobs._Work._take
    patch.setattr(jobs._Work, "_take", lambda *arguments: take(*arguments)[-1:])


@defect("work", kinds=("redrive", "copies", "edits"))  # the fold refuses to remove a message twice
def a_message_that_is_changed_twice(patch: Patch) -> None:
    take = jobs._Work._take

    def take_twice(*arguments: Any) -> Any:
        batch = take(*arguments)
        return [*batch[:1], *batch]

    patch.setattr(jobs._Work, "_take", take_twice)


@defect("pause", "fail")
def a_failure_after_the_start_that_joins(patch: Patch) -> None:
    _ignore_the_cutoff(patch)


@defect("fail again")
def a_message_that_joins_as_it_fails_again(patch: Patch) -> None:
    _ignore_the_cutoff(patch)


def _ignore_the_cutoff(patch: Patch) -> None:
    find = selection.find_candidates
    patch.setattr(jobs, "find_candidates", lambda spec, mailbox, *_: find(spec, mailbox, MAX_INT))
    patch.setattr(redrive_decisions, "_skip_reason", lambda message, copy, *_: None)


@defect(kinds=("redrive", "copies", "edits"))
def an_undo_of_messages_that_were_received(patch: Patch) -> None:
    def undo(command: UndoRedrive, mailbox: Mailbox, now: int) -> list[Event]:
        messages = tuple((stream, mailbox.messages[stream].last) for stream, _ in command.messages)
        return undo_as_is(msgspec.structs.replace(command, messages=messages), mailbox, now)

    undo_as_is = redrive_decisions._undo
    patch.setattr(redrive_decisions, "READY", ANY)
    patch.setitem(redrive_decisions._DECIDE, UndoRedrive, undo)


@defect(kinds=("redrive", "copies", "edits"))
def an_undo_that_leaves_a_message_out(patch: Patch) -> None:
    def undo(command: UndoRedrive, mailbox: Mailbox, now: int) -> list[Event]:
        rest = {"messages": command.messages[:-1], "originals": command.originals[:-1]}
        return undo_as_is(msgspec.structs.replace(command, **rest), mailbox, now)

    undo_as_is = redrive_decisions._undo
    patch.setitem(redrive_decisions._DECIDE, UndoRedrive, undo)


@defect("work", kinds=("reschedule",))  # the fold refuses to remove a message twice
def a_waiting_message_that_is_changed_twice(patch: Patch) -> None:
    a_message_that_is_changed_twice(patch)


@defect("work", kinds=WAITING)
def a_waiting_message_that_is_left_out(patch: Patch) -> None:
    a_message_that_is_skipped(patch)


@defect("pause", "send", "resume", kinds=WAITING)
def a_message_that_is_sent_after_the_start_and_joins(patch: Patch) -> None:
    find = selection.find_candidates
    patch.setattr(jobs, "find_candidates", lambda spec, mailbox, *_: find(spec, mailbox, MAX_INT))
    patch.setattr(redrive_decisions, "_skip_reason", lambda message, copy, *_: copy)
    patch.setattr(
        selection, "_candidates_at", lambda log, spec, _, some: candidates_at(log, spec, MAX_INT, some)
    )


@defect("release", kinds=WAITING)
def a_waiting_message_whose_place_is_that_of_its_latest_event(patch: Patch) -> None:
    patch.setattr(RedriveSpec, "place_of", lambda _, message: message.last)


@defect("redrive", kinds=WAITING)
def a_dead_letter_that_joins_as_it_is_redriven(patch: Patch) -> None:
    patch.setattr(
        selection, "_candidates_at", lambda log, spec, _, some: candidates_at(log, spec, MAX_INT, some)
    )


candidates_at = selection._candidates_at


@pytest.mark.parametrize(
    ("put_in", "kind", "steps"), DEFECTS, ids=[f"{each[0].__name__}-{each[1]}" for each in DEFECTS]
)
def test_the_model_finds(put_in: Defect, kind: str, steps: Sequence[str], monkeypatch: Patch) -> None:
    put_in(monkeypatch)
    is_waiting = kind in WAITING
    check = check_waiting_job(kind, steps, 5, 2) if is_waiting else check_job(kind, steps, 5, 2, receives=2)
    with pytest.raises(AssertionError):
        asyncio.run(check)
