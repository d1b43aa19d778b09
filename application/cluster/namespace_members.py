"""The members of a namespace; a client uses a list only after all members have recorded it (ADR 0063)."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from typing import NamedTuple

from postroom.application.cluster.members_history import (
    Cutoffs,
    read_cutoffs,
    read_history,
    record_cutoffs,
    record_members,
)
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.control_plane import NamespaceDirectory
from postroom.application.reports import SubscriptionReport
from postroom.application.telemetry import logger
from postroom.domain.errors import (
    Forbidden,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    StaleMembers,
    Unavailable,
)
from postroom.domain.namespace import (
    RESERVED_TOPIC,
    MembersRecord,
    check_members,
    find_predecessors,
)
from postroom.domain.settings import SettingsChanges

_generation: ContextVar[int | None] = ContextVar("generation", default=None)


def current_generation() -> int | None:
    """Return the generation of the current call; None outside a namespace."""
    return _generation.get()


@contextmanager
def use_generation(generation: int) -> Iterator[None]:
    """Make calls of mailboxes under a generation."""
    token = _generation.set(generation)
    try:
        yield
    finally:
        _generation.reset(token)


REFRESH_SECONDS = 2.0
"""Age up to which a list of members is used; a client that sends learns of new members at once."""
REPAIR_SECONDS = 15.0
"""Time after which writing the last records to a member that failed is tried again."""
RETRY_MS = 100
ANY_TOPIC = f"{RESERVED_TOPIC}-any"
"""Name of a topic that only a token for all topics covers."""
MAX_ROUNDS = 20
"""Attempts to record members while other clients record others."""


class Members(NamedTuple):
    """Members of a namespace, in a list that all of them have recorded.

    Arguments:
        names: sorted.
        cutoffs: messages of older members up to these log times are received first.
        refusal: why this client can't read their records; None if it can. Their owners then check that all
            have recorded them.
    """

    names: tuple[str, ...]
    cutoffs: Cutoffs
    refusal: Forbidden | None = None

    @property
    def generation(self) -> int:
        """Return the number of members."""
        return len(self.names)

    @property
    def by_age(self) -> list[str]:
        """Return the members, the oldest first: in an order that does not change when others are added."""
        return sorted(self.names, key=lambda name: (len(self.cutoffs.get(name, {})), name))


class FixedMembers:
    """Members that never change: those of a namespace in one store (ADR 0137)."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._members = Members(names, {})

    async def get(self) -> Members:
        """Return the members."""
        return self._members

    def invalidate(self) -> None:
        """Do nothing, as there are never others."""


class NamespaceMembers:
    """Finds the members of a namespace, and records new ones in every member."""

    def __init__(self, directory: NamespaceDirectory) -> None:
        self._directory = directory
        self._members: Members | None = None
        self._names: tuple[str, ...] = ()
        self._refresh_at = 0.0
        self._is_complete = True
        """Whether all members are known to have the last records."""
        self._lock = asyncio.Lock()

    async def get(self) -> Members:
        """Return the members.

        Raises: Unavailable when the namespace has no members, or when new members can't be recorded because a
            member has no owner; else the error with which a mailbox refuses the records.
        """
        if self._members is not None and asyncio.get_running_loop().time() < self._refresh_at:
            return self._members
        async with self._lock:  # of many callers, one asks
            if self._members is None or asyncio.get_running_loop().time() >= self._refresh_at:
                await self._refresh()
            assert self._members is not None, "_refresh raises if it finds no members"
            return self._members

    def invalidate(self) -> None:
        """Look for new members before the next call."""
        self._refresh_at = 0.0

    async def _refresh(self) -> None:
        try:
            listed = await self._directory.list_members()
            names = check_members({*self._names, *listed}, self._directory.namespace)
            # A mailbox may know of members that the proxy does not know of yet: their records say so.
            is_same = self._members is not None and names == self._members.names
            if not (is_same and self._is_complete and self._refresh_at):
                if not names:
                    raise Unavailable(
                        f"Namespace {self._directory.namespace} has no mailbox with an owner; start a runner "
                        f"with --mailbox {self._directory.namespace}@PROXY.",
                        RETRY_MS,
                    )
                try:
                    self._members = await self._join(names)
                except Forbidden as refusal:
                    self._members = Members(names, {}, refusal)
                    self._is_complete = False
                self._names = self._members.names
        except Unavailable:  # the last list is used, while that is allowed
            if self._members is None or self._refresh_at == 0.0:
                raise
        pause = REFRESH_SECONDS if self._is_complete else REPAIR_SECONDS
        self._refresh_at = asyncio.get_running_loop().time() + pause

    async def _join(self, names: tuple[str, ...]) -> Members:
        """Return the members, including others that mailboxes have recorded, once all have recorded them."""
        for _ in range(MAX_ROUNDS):
            histories, failure = await self._read_histories(names)
            recorded = {
                name for records in histories.values() for name in (records[-1].members if records else ())
            }
            if not recorded <= {*names}:
                names = check_members({*names, *recorded}, self._directory.namespace)
                continue
            if (cutoffs := await self._find_cutoffs(names, histories)) is not None:
                self._is_complete = failure is None
                return Members(names, cutoffs)
            if failure is not None:
                raise failure
            try:
                await self._record(names, histories)
            except (IdempotencyConflict, StaleMembers):  # another client records others
                await asyncio.sleep(RETRY_MS / 1_000)
                names = check_members(
                    {*names, *await self._directory.list_members()}, self._directory.namespace
                )
        raise Unavailable(f"The members of namespace {self._directory.namespace} keep changing.", RETRY_MS)

    async def _read_histories(
        self, names: Sequence[str]
    ) -> tuple[dict[str, tuple[MembersRecord, ...]], Unavailable | None]:
        """Return the records of the mailboxes that can be reached, and the error of one that can't."""
        failure: Unavailable | None = None
        histories = {}
        read = [read_history(self._directory.poller(name), self._directory.namespace) for name in names]
        for name, answer in zip(names, await asyncio.gather(*read, return_exceptions=True), strict=True):
            if isinstance(answer, Unavailable):
                failure = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                histories[name] = answer
        return histories, failure

    async def _find_cutoffs(
        self, names: tuple[str, ...], histories: dict[str, tuple[MembersRecord, ...]]
    ) -> Cutoffs | None:
        """Return the cut-offs if a member has them, which it records once all have recorded these members."""
        if len(names) == 1:
            return {}  # which its owner records
        cutoffs, missing = None, []
        for name in [each for each, records in histories.items() if records and records[-1].members == names]:
            try:
                recorded = await read_cutoffs(self._directory.poller(name), len(names))
            except Unavailable:
                continue
            if recorded is None:
                missing.append(name)
            cutoffs = cutoffs or recorded
        if cutoffs is not None:
            with suppress(Forbidden):
                for name in missing:  # a client ended before it had recorded them everywhere
                    await record_cutoffs(self._directory.poller(name), len(names), cutoffs)
        return cutoffs

    async def _record(self, names: tuple[str, ...], histories: dict[str, tuple[MembersRecord, ...]]) -> None:
        """Record the members in all of them, and then the cut-offs, which mark that as done."""
        # A client that sees only some topics would copy the policies of those alone.
        await self._directory.poller(names[0]).get_topic_policy(ANY_TOPIC)
        with use_generation(len(names)):
            for name in names:
                records = histories[name]
                if not records or records[-1].members != names:
                    generation = records[-1].generation if records else 0
                    await record_members(self._directory.poller(name), generation, names)
        recorded, failure = await self._read_histories(names)
        if failure is not None:
            raise failure
        if any(records[-1].members != names for records in recorded.values()):
            return  # there are more members by now
        cutoffs = {name: find_predecessors(name, recorded) for name in names}
        for name in names:
            if cutoffs[name]:
                await self._copy_topics(name, cutoffs[name])
        for name in names:
            await record_cutoffs(self._directory.poller(name), len(names), cutoffs)

    async def _copy_topics(self, name: str, predecessors: dict[str, int]) -> None:
        """Give a new member sections, paused topics and subscriptions of an older one; it keeps its own."""
        new, old = self._directory.poller(name), self._directory.poller(min(predecessors))
        existing = (await new.get_settings()).topics
        sections = (await old.get_settings()).topics
        copied = {each: sections[each] for each in sections.keys() - existing.keys() - {RESERVED_TOPIC}}
        if copied:
            await new.set_settings(SettingsChanges(topics=copied))
        for topic in await old.list_topics():
            if topic.paused and topic.topic != RESERVED_TOPIC and topic.topic not in existing:
                await pause_topic(new, topic.topic)
        names = {each.name for each in await new.list_subscriptions()}
        for each in await old.list_subscriptions():
            if each.name not in names:
                await _copy_subscription(each, new)


async def _copy_subscription(subscription: SubscriptionReport, mailbox: Mailbox) -> None:
    """Give a mailbox a subscription, with the messages sent to it since the subscription was created.

    A mailbox without a history, or whose clock is behind, gets it from now on. A mailbox that has messages in
    its topic refuses it and goes without it, so that the namespace can be used all the same.
    """
    name, error = subscription.name, ""
    for start in (datetime.fromisoformat(subscription.created_at), None):
        try:
            await mailbox.set_subscription(name, subscription.filter, start=start)
            return
        except InvalidRequest as refusal:
            error = str(refusal)
    logger().warning("namespace.subscription_refused", mailbox=mailbox.name, subscription=name, error=error)


async def pause_topic(mailbox: Mailbox, topic: str) -> None:
    """Pause a topic, also one that the mailbox does not have yet: a section makes it exist.

    The section is removed again, as the topic follows the globs and the default policy.
    """
    try:
        await mailbox.pause_topic(topic)
    except NotFound:
        shards = (await mailbox.get_topic_policy(topic)).shards
        await mailbox.set_topic_policy(topic, {"shards": shards})
        await mailbox.pause_topic(topic)
        await mailbox.set_topic_policy(topic, {"shards": None})
