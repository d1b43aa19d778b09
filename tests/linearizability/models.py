"""Models of what Postroom promises, for one lease, one log or one message each."""

from collections.abc import Iterator
from typing import NamedTuple

from tests.linearizability.checker import Model
from tests.linearizability.history import Operation

REFUSED = "refused"
REFUSED_IN_DOUBT = "refused in doubt"
"""Refused after an attempt whose outcome was unknown: it may have been granted, and have expired since."""


class LeaseState(NamedTuple):
    """The lease of a mailbox.

    Arguments:
        holder: the runner that has it; empty without one.
        is_refused: the holder was told that it has lost the lease, by an admin that saw it expire.
    """

    holder: str
    epoch: int
    acquisition: str
    is_refused: bool = False


def lease_model(mailbox: str) -> Model:
    """Return the model of a lease: one holder at a time, and an epoch that grows with every acquisition.

    Operations:
        acquire [runner, acquisition] -> epoch, `refused` or `refused in doubt`
        renew [runner, epoch] -> epoch, or `refused`
        release [runner, epoch] -> true, or `refused`
        own [runner, epoch] -> true: the runner took its lease for valid, on its own clock

    A lease may expire between any two operations, and each admin decides by itself when: one may refuse to
    renew a lease that another takes for valid. `own` is what an expiry that came too early contradicts.
    """
    return Model(f"the lease of {mailbox}", LeaseState("", 0, ""), _step_lease)


def _step_lease(state: LeaseState, operation: Operation) -> Iterator[LeaseState]:
    match operation.kind:
        case "acquire":
            yield from _step_acquire(state, operation)
        case "renew":
            runner, epoch = operation.input
            has_it = (state.holder, state.epoch) == (runner, epoch)
            if operation.output == REFUSED:
                yield state._replace(is_refused=state.is_refused or has_it)
            elif has_it and operation.output in (None, epoch):
                yield state
        case "release":
            runner, epoch = operation.input
            has_it = (state.holder, state.epoch) == (runner, epoch)
            if has_it:
                yield LeaseState("", state.epoch, state.acquisition)
            elif operation.output == REFUSED or state.epoch == epoch:
                yield state
        case "own":
            if (state.holder, state.epoch) == tuple(operation.input) and not state.is_refused:
                yield state


def _step_acquire(state: LeaseState, operation: Operation) -> Iterator[LeaseState]:
    runner, acquisition = operation.input
    epoch = operation.output
    if epoch in (REFUSED, REFUSED_IN_DOUBT):
        # by another holder, or because the lease of this very acquisition has ended
        if (state.holder and state.holder != runner) or state.acquisition == acquisition:
            yield state
        if epoch == REFUSED_IN_DOUBT:
            yield LeaseState(runner, state.epoch + 1, acquisition, is_refused=True)
    elif epoch is None:
        yield LeaseState(runner, state.epoch + 1, acquisition)
        yield state
    elif (state.holder, state.epoch, state.acquisition) == (runner, epoch, acquisition):
        if not state.is_refused:
            yield state
    elif epoch > state.epoch:
        yield LeaseState(runner, epoch, acquisition)


def log_model(mailbox: str) -> Model:
    """Return the model of a mailbox's log: nothing of an epoch follows what a later one wrote.

    Operations:
        open [epoch] -> true: the owner of an epoch took the log over
        append [epoch] -> true: a record of that epoch was accepted

    Both may be `refused`, which changes nothing.
    """
    return Model(f"the log of {mailbox}", 0, _step_log)


def _step_log(epoch: int, operation: Operation) -> Iterator[int]:
    (own,) = operation.input
    if operation.output == REFUSED:
        yield epoch
    elif operation.kind == "open":
        if own > epoch:
            yield own
    elif own == epoch:
        yield epoch


class MessageState(NamedTuple):
    """A message: whether it was stored, how often it was delivered, and by which delivery it was acked."""

    is_stored: bool
    attempt: int
    acked_by: int


def message_model(message: str) -> Model:
    """Return the model of a message: it is neither lost nor delivered again once that was acknowledged.

    Operations:
        send [] -> true
        receive [] -> attempt, counted from 1
        ack [attempt] -> true, or `refused`
        find [] -> `acked`, `unsettled` or `absent`: what the mailbox says in the end

    Visibility may end between any two operations, so a message that is not acked can be delivered again.
    """
    return Model(f"message {message}", MessageState(False, 0, 0), _step_message)


def _step_message(state: MessageState, operation: Operation) -> Iterator[MessageState]:
    match operation.kind:
        case "send":
            if operation.output != REFUSED or not state.is_stored:
                yield state._replace(is_stored=state.is_stored or operation.output != REFUSED)
        case "receive":
            if state.is_stored and not state.acked_by and operation.output > state.attempt:
                yield state._replace(attempt=operation.output)
        case "ack":
            (attempt,) = operation.input
            if operation.output == REFUSED:
                yield state
            elif state.is_stored and state.acked_by in (0, attempt) and attempt >= state.attempt:
                yield state._replace(acked_by=attempt)
        case "find":
            status = "absent" if not state.is_stored else "acked" if state.acked_by else "unsettled"
            if status == operation.output:
                yield state
