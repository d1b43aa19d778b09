"""Records of the members of a namespace in the log of one of its mailboxes, and their fence (ADR 0063).

A record is a message of a reserved topic that is settled at once. Its id contains the generation before it,
and ids are never reused: if several clients record members at once, one succeeds, and the others read its
record.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec
from blake3 import blake3

from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.query_results import MessageDetail
from postroom.domain.errors import (
    BrokenLog,
    Forbidden,
    InvalidRequest,
    NotFound,
    PostroomError,
    StaleMembers,
    Unavailable,
)
from postroom.domain.namespace import RESERVED_TOPIC, MembersRecord, check_members

MEMBERS = "members"
CUTOFFS = "cutoffs"
DRAINED = "drained"
MAX_RECORDS = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

T = TypeVar("T")

Cutoffs = Mapping[str, Mapping[str, int]]
"""By member, the older members and the log time (µs) at which each learned of it."""


async def read_history(
    mailbox: Mailbox, namespace: str, records: tuple[MembersRecord, ...] = ()
) -> tuple[MembersRecord, ...]:
    """Return the records of members in a mailbox, oldest first.

    Arguments:
        records: those that are known already.
    """
    for _ in range(MAX_RECORDS):
        generation = records[-1].generation if records else 0
        try:
            detail = await mailbox.get_message(_record_id(generation))
        except NotFound:
            return records
        except Forbidden:  # the token is for some topics only; the known records are used
            if records:
                return records
            raise
        record = MembersRecord(_read_members(detail, namespace), _log_time(detail))
        if record.generation <= generation:
            raise _broken_log(mailbox.name, detail)
        records = (*records, record)
    raise BrokenLog(f"Mailbox {mailbox.name} has more than {MAX_RECORDS} records of members.", 0)


async def record_members(mailbox: Mailbox, generation: int, members: tuple[str, ...]) -> None:
    """Record the members that follow a generation.

    Raises: IdempotencyConflict when others were recorded.
    """
    await _write(mailbox, _record_id(generation), MEMBERS, members)


async def read_cutoffs(mailbox: Mailbox, generation: int) -> Cutoffs | None:
    """Return the cut-offs of a generation that all members have recorded; None if the mailbox has none."""
    try:
        detail = await mailbox.get_message(_joined_id(generation))
    except (NotFound, Forbidden):
        return None
    return _decode(mailbox.name, detail, CUTOFFS, dict[str, dict[str, int]])


async def record_cutoffs(mailbox: Mailbox, generation: int, cutoffs: Cutoffs) -> None:
    """Record the cut-offs of a generation, once all members have recorded its members."""
    await _write(mailbox, _joined_id(generation), CUTOFFS, cutoffs)


async def is_drained(mailbox: Mailbox, generation: int, topic: str) -> bool:
    """Return whether it is recorded that a topic of a mailbox need not wait for older members."""
    try:
        await mailbox.get_message(_drained_id(generation, topic))
    except (NotFound, Forbidden):
        return False
    return True


async def record_drained(mailbox: Mailbox, generation: int, topic: str) -> None:
    """Record that older members of a mailbox have no more messages of a topic, if allowed."""
    with suppress(Forbidden):
        await _write(mailbox, _drained_id(generation, topic), DRAINED, topic)


async def settle_records(mailbox: Mailbox) -> None:
    """Settle the records that can be settled now; they stay readable in the log."""
    with suppress(PostroomError):
        while received := await mailbox.receive_messages(RESERVED_TOPIC):
            await mailbox.ack_messages([each.receipt for each in received])


def _record_id(generation: int) -> str:
    return f"{RESERVED_TOPIC}-after-{generation}"


def _joined_id(generation: int) -> str:
    return f"{RESERVED_TOPIC}-joined-{generation}"


def _drained_id(generation: int, topic: str) -> str:
    return f"{RESERVED_TOPIC}-drained-{generation}-{blake3(topic.encode()).hexdigest(16)}"


async def _write(mailbox: Mailbox, id_: str, name: str, content: object) -> None:
    encoded = msgspec.json.encode(content, order="sorted")
    await mailbox.send_message(
        # As an attribute it is readable after the payload is gone; as the payload it is compared.
        NewMessage(
            topic=RESERVED_TOPIC,
            payload=encoded,
            message_id=id_,
            attrs={name: encoded.decode()},
            content_type="application/json",
        )
    )
    await settle_records(mailbox)


def _read_members(detail: MessageDetail, namespace: str) -> tuple[str, ...]:
    names = _decode(detail.mailbox, detail, MEMBERS, tuple[str, ...])
    try:
        members = check_members(names, namespace)
    except InvalidRequest:
        members = ()
    if not members or members != names:
        raise _broken_log(detail.mailbox, detail)
    return members


def _decode(mailbox: str, detail: MessageDetail, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(detail.item.custom_headers[name], type=kind)
    except (KeyError, msgspec.MsgspecError):
        raise _broken_log(mailbox, detail) from None


def _broken_log(mailbox: str, detail: MessageDetail) -> BrokenLog:
    return BrokenLog(
        f"Message {detail.message_id} of mailbox {mailbox} is not a record of members of a namespace; its "
        "topic is reserved for them.",
        detail.history[0].position,
    )


def _log_time(detail: MessageDetail) -> int:
    return (datetime.fromisoformat(detail.history[0].at) - _EPOCH) // timedelta(microseconds=1)


RETRY_MS = 500


class MembersFence:
    """Refuses changes by clients whose list of the members is outdated.

    A call is admitted if its client knows the members that this mailbox has recorded, and all members have
    recorded them. While members are recorded, no other call is in progress, so no message of a client with
    fewer members comes after the record.

    Arguments:
        mailbox: as its owner may use it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._namespace = mailbox.name.partition("@")[0]
        self._records: tuple[MembersRecord, ...] | None = None
        self._joined = 0
        """Generation that all members have recorded, according to the log."""
        self._calls = 0
        self._recording = asyncio.Lock()
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def admit(self, generation: int | None, topic: str = "") -> AsyncIterator[None]:
        """Make a call that changes the mailbox within the context.

        Arguments:
            generation: number of members that the caller knows; None for a caller that named the mailbox.
            topic: of the messages that it sends.

        Raises: StaleMembers when the mailbox has recorded more; Unavailable when other members may not have
            recorded them yet.
        """
        if topic == RESERVED_TOPIC:
            async with self._recording:
                while self._calls:
                    self._idle.clear()
                    await self._idle.wait()
                try:
                    yield
                finally:
                    self._records = None
            return
        if generation is None:
            yield
            return
        async with self._recording:
            await self._check(generation)
            self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    async def check(self, generation: int | None) -> None:
        """Check a call that may wait, as `admit` does when it begins."""
        if generation is not None:
            async with self._recording:
                await self._check(generation)

    async def _check(self, generation: int) -> None:
        if self._records is None:
            self._records = await read_history(self._mailbox, self._namespace)
        if not self._records and generation == 1:
            # Whoever adds another mailbox must see that this one was used alone.
            await record_members(self._mailbox, 0, (self._mailbox.name,))
            self._records = await read_history(self._mailbox, self._namespace)
        recorded = self._records[-1].generation if self._records else 0
        if generation == recorded and await self._is_joined(recorded):
            return
        if generation < recorded:
            raise StaleMembers(
                f"Namespace {self._namespace} has {recorded} mailboxes, but the call chose one of "
                f"{generation}; ask a proxy for its members, and choose again."
            )
        raise Unavailable(
            f"The {generation} mailboxes of namespace {self._namespace} have not recorded each other yet; "
            "repeat the call, or use the namespace once with a token for all topics.",
            RETRY_MS,
        )

    async def _is_joined(self, generation: int) -> bool:
        if self._joined != generation and (
            generation == 1 or await read_cutoffs(self._mailbox, generation) is not None
        ):
            self._joined = generation
        return self._joined == generation
