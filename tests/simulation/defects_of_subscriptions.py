"""Defects of subscriptions, which their simulation must find."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from postroom.application.mailbox.command_enricher import CommandEnricher
from postroom.application.subscriptions import SubscriptionCopier
from postroom.domain.mailbox import batch, decide, snapshot, state, subscription_decisions
from postroom.domain.names import copy_stream
from postroom.domain.subscription import AdvanceSubscription, SubscriptionFilter

Patch = pytest.MonkeyPatch
DEFECTS_OF_SUBSCRIPTIONS: list[Callable[[Patch], None]] = []
DECIDERS: dict[Any, Any] = decide._DECIDE


def defect(put_in: Callable[[Patch], None]) -> Callable[[Patch], None]:
    DEFECTS_OF_SUBSCRIPTIONS.append(put_in)
    return put_in


@defect
def a_batch_that_is_not_copied(patch: Patch) -> None:
    patch.setattr(batch, "fan_out", lambda sent, mailbox, now: [])


@defect
def a_seam_that_is_not_read(patch: Patch) -> None:
    """The subscription is live without the messages that were sent since its log was read."""

    async def pretend(self: CommandEnricher, command: AdvanceSubscription, group: Any) -> AdvanceSubscription:
        return msgspec.structs.replace(command, through=group.state.mailbox.position)

    patch.setattr(CommandEnricher, "_with_newest", pretend)


@defect
def a_seam_without_the_commands_of_its_group(patch: Patch) -> None:
    async def read(self: CommandEnricher, command: AdvanceSubscription, group: Any) -> AdvanceSubscription:
        found = await with_newest(self, command, group)
        last = group.state.position
        return msgspec.structs.replace(found, sent=tuple(each for each in found.sent if each[0] <= last))

    with_newest = CommandEnricher._with_newest
    patch.setattr(CommandEnricher, "_with_newest", read)


@defect
def a_full_queue_that_loses_a_message(patch: Patch) -> None:
    def add(self: Any, sent: Any, opened: Any) -> bool:
        put(self, sent, opened)
        return True

    put = subscription_decisions._Queue.add
    patch.setattr(subscription_decisions._Queue, "add", add)


@defect
def a_subscription_behind_that_begins_after_the_message_without_room(patch: Patch) -> None:
    def advance(subscription: Any, status: Any, position: int, now: int, skipped: int = 0) -> Any:
        late = position + (status == "copying" and subscription.is_live)
        return event(subscription, status, late, now, skipped)

    event = subscription_decisions._advance
    patch.setattr(subscription_decisions, "_advance", advance)


@defect
def progress_that_forgets_the_last_copy(patch: Patch) -> None:
    def advance(subscription: Any, status: Any, position: int, now: int, skipped: int = 0) -> Any:
        early = position - (status == "copying" and subscription.status == "copying")
        return event(subscription, status, max(early, subscription.position), now, skipped)

    event = subscription_decisions._advance
    patch.setattr(subscription_decisions, "_advance", advance)


@defect
def copies_in_the_wrong_order(patch: Patch) -> None:
    def decide_reversed(command: AdvanceSubscription, mailbox: Any, now: int) -> Any:
        return advance(msgspec.structs.replace(command, sent=command.sent[::-1]), mailbox, now)

    advance = subscription_decisions._DECIDE[AdvanceSubscription]
    patch.setitem(subscription_decisions._DECIDE, AdvanceSubscription, decide_reversed)


@defect
def a_rewind_that_leaves_the_queue_as_it_is(patch: Patch) -> None:
    async def clear(self: SubscriptionCopier, subscription: Any) -> None:
        step = AdvanceSubscription(subscription.name, subscription.version, is_cleared=True)
        await self._engine.submit([step])

    patch.setattr(SubscriptionCopier, "_clear", clear)


@defect
def a_rewind_that_gives_copies_their_former_ids(patch: Patch) -> None:
    patch.setattr(
        subscription_decisions,
        "copy_stream",
        lambda subscription, rewinds, stream: copy_stream(subscription, 0, stream),
    )


@defect
def a_snapshot_that_forgets_subscriptions(patch: Patch) -> None:
    def restore(mailbox: Any, head: Any, windows: Any) -> None:
        restore_head(mailbox, head, windows)
        mailbox.set_subscriptions({})

    restore_head = snapshot._restore_head
    patch.setattr(snapshot, "_restore_head", restore)


@defect
def retention_that_removes_what_is_not_copied(patch: Patch) -> None:
    patch.setattr(state.Mailbox, "copied_through", property(lambda self: self.position))


@defect
def subscriptions_that_are_found_as_before_a_change(patch: Patch) -> None:
    def keep(self: Any, subscriptions: Any) -> None:
        self.subscriptions = subscriptions

    patch.setattr(state.Mailbox, "set_subscriptions", keep)


@defect
def a_filter_that_ignores_headers(patch: Patch) -> None:
    patch.setattr(SubscriptionFilter, "covers_headers", lambda self, headers: True)


@defect
def a_subscription_that_copies_copies(patch: Patch) -> None:
    def covers(self: SubscriptionFilter, sent: Any) -> bool:
        return self.covers_topic(sent.topic) and self.covers_headers(sent.headers)

    patch.setattr(SubscriptionFilter, "covers", covers)


@defect
def a_subscription_that_never_is_live_again(patch: Patch) -> None:
    patch.setitem(subscription_decisions._DECIDE, AdvanceSubscription, lambda command, mailbox, now: [])
