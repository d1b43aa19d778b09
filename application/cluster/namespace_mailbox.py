"""A namespace as one mailbox, whose messages are in several (ADR 0063)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from postroom.application.cluster.namespace_members import (
    FixedMembers,
    Members,
    NamespaceMembers,
    pause_topic,
    use_generation,
)
from postroom.application.cluster.namespace_merges import MERGES, merge_answers, merge_subscription
from postroom.application.cluster.namespace_receiver import NamespaceReceiver, ReceiptHomes
from postroom.application.cluster.namespace_redrives import NamespaceRedrives
from postroom.application.cluster.store_receiver import StoreReceiver
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.outgoing import NewId, OutgoingMessage, send_outgoing
from postroom.application.mailbox.receive import StreamMessages
from postroom.application.mailbox.settle import (
    DeliveryWindows,
    check_nack,
    check_receipt,
    check_results,
    extended_receipts,
    finished_receipts,
    submit_valid,
    with_results,
)
from postroom.application.messages import MessageResult, NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation, derive
from postroom.application.ports.control_plane import NamespaceDirectory
from postroom.application.reports import ScheduleReport
from postroom.domain.arguments import check_items
from postroom.domain.errors import (
    InvalidRequest,
    NotFound,
    PostroomError,
    Rejected,
    StaleMembers,
    Unavailable,
)
from postroom.domain.mailbox.subscription_decisions import queue_taken
from postroom.domain.message import NackAction, Receipt
from postroom.domain.namespace import RESERVED_TOPIC, home_of
from postroom.domain.policy import check_visibility

T = TypeVar("T")

STALE_PAUSE_SECONDS = 0.05

READS_OF_MESSAGES = ("get_message", "wait_for_result", "explain_message")
"""Operations that the mailbox with the message answers."""
CHANGES_OF_TOPICS = (
    "purge_topic",
    "resume_topic",
    "pause_schedule",
    "resume_schedule",
    "run_schedule",
    "delete_schedule",
    "delete_search",
)
"""Operations of the mailboxes that have the topic, schedule or search, one after the other."""
CHANGES_OF_SETTINGS = ("set_topic_policy", "set_settings", "save_search")
"""Operations of all mailboxes, also of mailboxes that are added meanwhile."""


@derive(Mailbox)
class NamespaceMailbox(NamespaceRedrives, Mailbox):
    """`Mailbox` over the mailboxes of a namespace; its name is the namespace's.

    A message is sent to the mailbox that its sticky key hashes to, or its topic's name without one. A receive
    asks all mailboxes, settlements find the one that delivered the message, and policies, pauses, purges,
    redrives and subscriptions go to all.

    Arguments:
        timeout_ms: time for each call, besides the wait for messages.
        new_id: generator of UUIDv7s.
        fixed: the members of a namespace in one store; None finds and records those of a cluster.
    """

    def __init__(
        self,
        directory: NamespaceDirectory,
        timeout_ms: int,
        new_id: NewId,
        fixed: FixedMembers | None = None,
    ) -> None:
        self._directory = directory
        self._timeout = timeout_ms / 1_000
        self._members = fixed or NamespaceMembers(directory)
        self._messages = MessageFactory(f"{directory.namespace}@members", lambda: 0, new_id)
        self._homes = ReceiptHomes(self)
        self._windows = DeliveryWindows()
        self._receiver = self._make_receiver()
        receive = self._receiver.receive_messages
        self.receive_messages = receive  # type: ignore[method-assign] # it has the signature of the method
        self.stream_messages = StreamMessages(  # type: ignore[method-assign] # as above
            receive, self.nack_messages, self._windows
        )

    def _make_receiver(self) -> NamespaceReceiver | StoreReceiver:
        return NamespaceReceiver(self._directory, self._get_members, self.refresh, self._homes, self._timeout)

    @property
    def name(self) -> str:
        """Return the name of the namespace."""
        return self._directory.namespace

    async def open(self) -> None:
        """Find the members.

        Raises: Unavailable when there are none for the time of a call, or they can't be reached.
        """
        await self._get_members()

    def refresh(self) -> None:
        """Look for mailboxes that were added before the next call, not within seconds."""
        self._members.invalidate()

    async def close(self) -> None:
        """End the tasks in the background."""
        await self._receiver.close()

    # -- sending ---

    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message; see `Mailbox.send_message`."""
        outgoing = self._prepare(message)
        (answer,) = await self._send([outgoing.message])
        if isinstance(answer, Rejected):
            raise answer
        return outgoing.result(answer)

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; see `Mailbox.send_batch`."""
        return await send_outgoing(check_items("messages", messages), self._prepare, self._send)

    def _prepare(self, message: object) -> OutgoingMessage:
        outgoing = self._messages.prepare(message)
        if outgoing.message.topic == RESERVED_TOPIC:
            raise InvalidRequest(f"The topic {RESERVED_TOPIC} is reserved; send to another one.")
        return outgoing

    async def _send(self, messages: list[NewMessage]) -> list[Sent | Rejected]:
        """Send messages to their mailboxes; again to others if there are more mailboxes than were known."""
        answers: dict[int, Sent | Rejected] = {}
        refused_by: dict[int, str] = {}
        deadline = asyncio.get_running_loop().time() + self._timeout
        while len(answers) < len(messages):
            members = await self._get_members()
            groups: dict[str, list[int]] = {}
            for index, message in enumerate(messages):
                if index in answers:
                    continue
                home = home_of(message.sticky_key or message.topic, members.names)
                former = refused_by.get(index, home)
                if former != home and await self._has(former, message):
                    answers[index] = Sent(str(message.message_id), duplicate=True)
                else:
                    groups.setdefault(home, []).append(index)
            sending = (self._send_to(home, members, messages, group) for home, group in groups.items())
            results = await asyncio.gather(*sending, return_exceptions=True)
            for (home, group), result in zip(groups.items(), results, strict=True):
                if isinstance(result, StaleMembers):
                    refused_by |= dict.fromkeys(group, home)
                    self._members.invalidate()
                elif isinstance(result, BaseException):
                    raise result
                else:
                    answers |= dict(zip(group, result, strict=True))
            if len(answers) < len(messages):
                if asyncio.get_running_loop().time() >= deadline:
                    raise Unavailable(f"The members of namespace {self.name} keep changing; send again.")
                await asyncio.sleep(STALE_PAUSE_SECONDS)
        return [answers[index] for index in range(len(messages))]

    async def _send_to(
        self, home: str, members: Members, messages: list[NewMessage], group: list[int]
    ) -> list[Sent | Rejected]:
        mailbox = self._directory.mailbox(home)
        with use_generation(members.generation):
            if len(group) > 1:
                return await mailbox.send_batch([messages[index] for index in group])
            try:
                return [await mailbox.send_message(messages[group[0]])]
            except StaleMembers:
                raise
            except Rejected as refusal:
                return [refusal]

    async def _has(self, former: str, message: NewMessage) -> bool:
        """Return whether an attempt whose outcome was unknown had stored a message in its former mailbox."""
        try:
            await self._directory.mailbox(former).get_message(str(message.message_id))
        except NotFound:
            return False
        return True

    # -- settling ---

    async def ack_messages(
        self, receipts: Sequence[Receipt], /, *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        """Settle deliveries; see `Mailbox.ack_messages`."""
        by_receipt = {} if results is None else check_results(receipts, results)
        return await self._settle(
            receipts, lambda mailbox, some: with_results(mailbox.ack_messages, by_receipt)(some), self._end
        )

    async def nack_messages(
        self,
        receipts: Sequence[Receipt],
        /,
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        """Fail deliveries; see `Mailbox.nack_messages`."""
        options = check_nack(reason, delay_ms, action, traceback)._asdict()
        return await self._settle(
            receipts,
            lambda mailbox, some: mailbox.nack_messages(some, **options),
            self._end,
        )

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Extend deliveries; see `Mailbox.extend_visibility`."""
        check_visibility(visibility_ms)

        def extend(some: list[Receipt], answers: list[Rejected | None]) -> None:
            self._windows.extend(extended_receipts(some, answers), visibility_ms)

        return await self._settle(
            receipts, lambda mailbox, some: mailbox.extend_visibility(some, visibility_ms), extend
        )

    def _end(self, receipts: list[Receipt], answers: list[Rejected | None]) -> None:
        over = finished_receipts(receipts, answers)
        self._windows.settle(over)

    async def _settle(
        self,
        receipts: Sequence[Receipt],
        settle: Callable[[Mailbox, list[Receipt]], Awaitable[list[Rejected | None]]],
        learn: Callable[[list[Receipt], list[Rejected | None]], None],
    ) -> list[Rejected | None]:
        async def submit(valid: list[Receipt]) -> list[Rejected | None]:
            answers = await self._settle_at_homes(valid, settle)
            learn(valid, answers)
            return answers

        return await submit_valid(check_items("receipts", receipts), check_receipt, submit)

    async def _settle_at_homes(
        self,
        receipts: list[Receipt],
        settle: Callable[[Mailbox, list[Receipt]], Awaitable[list[Rejected | None]]],
    ) -> list[Rejected | None]:
        """Settle each delivery where it was made; one of another client, at the mailbox that knows it."""
        answers: dict[int, Rejected | None] = {}

        async def settle_at(name: str, group: list[int]) -> None:
            some = [receipts[index] for index in group]
            answers.update(zip(group, await settle(self._directory.mailbox(name), some), strict=True))

        groups: dict[str, list[int]] = {}
        unknown: list[int] = []
        for index, receipt in enumerate(receipts):
            home = self._homes.get(receipt)
            groups.setdefault(home, []).append(index) if home else unknown.append(index)
        await asyncio.gather(*(settle_at(name, group) for name, group in groups.items()))
        if unknown:
            for name in (await self._get_members()).names:
                group = [i for i in unknown if isinstance(answers.get(i, _UNKNOWN), NotFound)]
                if group:
                    await settle_at(name, group)
        return [answers[index] for index in range(len(receipts))]

    # -- administration ---

    async def _redrive_dead_letters(self, operation: Operation, arguments: Arguments) -> int:
        limit, redriven = arguments["limit"], 0

        async def redrive(mailbox: Mailbox) -> None:
            nonlocal redriven
            if redriven < limit:
                redriven += await operation.ask(mailbox, {**arguments, "limit": limit - redriven})

        await self._at_each_that_has_it(redrive, self._at_all)
        return redriven

    async def _pause_topic(self, operation: Operation, arguments: Arguments) -> None:
        """Pause a topic in all mailboxes, also where it does not exist yet."""
        topic = arguments["topic"]
        if topic not in {each.topic for each in await self.list_topics()}:
            raise NotFound(f"Namespace {self.name} has no topic {topic}; `list_topics` returns those it has.")
        await self._at_all(lambda mailbox: pause_topic(mailbox, topic))

    async def _change_subscription(self, operation: Operation, arguments: Arguments) -> Any:
        """Set, rewind or delete a subscription in all mailboxes, since a moment that they have in common."""
        if arguments.get("start"):  # 0 is the beginning of each
            await self._check_moment("start", arguments["start"])
        is_set, name = operation.name == "set_subscription", arguments["name"]
        if is_set and name not in {each.name for each in await self.list_subscriptions()}:
            for topic in await self.list_topics():  # so that none has it if one refuses it
                if topic.topic == name and (topic.ready or topic.delayed or topic.in_flight or topic.dead):
                    raise queue_taken(name)
        reports: dict[str, Any] = {}
        own = {**arguments}

        async def change(mailbox: Mailbox) -> None:
            reports[mailbox.name] = report = await operation.ask(mailbox, own)
            if own.get("if_missing"):  # all have the filter of the first, which decides who created it
                own["filter_"] = report.filter

        try:
            await (self._at_all(change) if is_set else self._at_each_that_has_it(change, self._at_all))
        except PostroomError as error:
            if not reports or arguments.get("dry_run"):
                raise
            rest = [each for each in (await self._get_members()).names if each not in reports]
            failure = copy(error)
            changed, others = ", ".join(reports), ", ".join(rest)
            text = f"The subscription has changed in {changed}, but not in {others}; repeat the call."
            failure.args = (f"{error} {text}",)
            raise failure from error
        return merge_subscription([*reports.values()])

    _set_subscription = _rewind_subscription = _delete_subscription = _change_subscription

    async def _set_schedule(self, operation: Operation, arguments: Arguments) -> ScheduleReport:
        """Set a schedule in the mailbox that has it: a new one, in the one that its name hashes to.

        One mailbox has it, so that each tick is sent once.
        """
        name = arguments["name"]

        async def set_schedule(members: Members) -> ScheduleReport:
            pages = [await self._directory.mailbox(each).list_schedules() for each in members.names]
            homes = (
                mailbox
                for mailbox, page in zip(members.names, pages, strict=True)
                if any(each.name == name for each in page)
            )
            home = next(homes, None) or home_of(name, members.names)
            report: ScheduleReport = await operation.ask(self._directory.mailbox(home), arguments)
            return report

        return await self._at_members(set_schedule)

    async def _call(self, operation: Operation, arguments: Arguments) -> Any:
        def ask(mailbox: Mailbox) -> Awaitable[Any]:
            return operation.ask(mailbox, arguments)

        if operation.name in READS_OF_MESSAGES:
            return await self._ask_any(ask)
        if operation.name in CHANGES_OF_TOPICS:
            answers = await self._at_each_that_has_it(ask, self._at_all)
        else:
            answers = await (self._at_all if operation.name in CHANGES_OF_SETTINGS else self._ask_all)(ask)
        return MERGES.get(operation.name, merge_answers)(answers)

    async def _at_all(self, call: Callable[[Mailbox], Awaitable[T]]) -> list[T]:
        """Make a call of all mailboxes, also of mailboxes that were added meanwhile; return its answers."""
        answers: list[T] = []

        async def call_all(members: Members) -> list[T]:
            for name in members.names:
                answers.append(await call(self._directory.mailbox(name)))  # noqa: PERF401 # also before an error
            return answers

        return await self._at_members(call_all)

    async def _at_members(self, call: Callable[[Members], Awaitable[T]]) -> T:
        """Make a call under the generation of the members; again if a mailbox was added meanwhile."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        while True:
            members = await self._get_members()
            try:
                with use_generation(members.generation):
                    return await call(members)
            except StaleMembers:
                self._members.invalidate()
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(STALE_PAUSE_SECONDS)


_UNKNOWN = NotFound("No mailbox of the namespace was asked yet.")
