"""`postroom demo`: send, receive, crash, rebuild and search on an empty store, in under a minute."""

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.dlq import list_dead_letters
from postroom.adapters.cli.inspect import backlog, show
from postroom.adapters.cli.search import search
from postroom.adapters.cli.session import MEMORY, Session
from postroom.application.extras import MissingExtra, explain_missing_extra
from postroom.application.messages import NewMessage
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, NotFound, Rejected, Saturated, Unavailable
from postroom.domain.policy import TopicPolicy

if TYPE_CHECKING:
    from postroom.adapters.compose.connect import SharedMailbox
    from postroom.application.received_messages import ReceivedMessage


STORE, MAILBOX = "postroom-demo.db", "demo@local"
POLICY = TopicPolicy(visibility_ms=2_000, max_attempts=3, backoff_base_ms=50, backoff_max_ms=400)
HANGS_AFTER = 1_000
POLL_SECONDS = 0.1
FILES = ("", "-wal", "-shm", "-views", "-views-wal", "-views-shm", "-views-lock")


def demo(
    session: Session,
    console: Annotated[
        bool | None,
        Option(
            "--console/--no-console",
            help="Serve a read-only console of a shop instead; or do not show the console at the end.",
        ),
    ] = None,
) -> Coroutine[Any, Any, None] | None:
    """Send 20,000 messages to two consumers, kill one, rebuild the read models, and search.

    The demo writes to postroom-demo.db, or the file of --store, and does not delete it afterwards. Without
    the extra `views` it omits the search. On a terminal, it shows the console at the end.

    With --console, it serves the console of a shop with a week of history, until interrupted. Its store is in
    a temporary folder, and removed at the end.
    """
    if not console:
        return _tell(session, shows_console=console is None and sys.stdin.isatty() and sys.stdout.isatty())
    with explain_missing_extra("up"):
        from postroom.adapters.cli.demo_shop import show_shop
    show_shop(session)
    return None


async def _tell(session: Session, *, shows_console: bool) -> None:
    from postroom.adapters.compose.store import is_on_servers

    settings = msgspec.structs.replace(
        session.settings, store=session.settings.store or STORE, mailbox=MAILBOX
    )
    session = Session(session.command, settings, session.out)
    if is_on_servers(session.store):
        raise InvalidRequest(
            "The demo does not run on a server, because it deletes the store of its previous run; omit "
            "--store, or name a new file."
        )
    if settings.store != MEMORY:
        await _remove_previous(session)
    start = time.monotonic()
    facts: dict[str, Any] = {"store": settings.store, "mailbox": MAILBOX}
    async with session.use(create=True) as postroom:
        facts |= await _traffic(session, postroom)
    if settings.store == MEMORY:
        session.out.note("The store was in memory; the demo shows more without --store memory:.")
    else:
        facts["read_models"] = await asyncio.to_thread(_rebuild, session)
        if not session.out.as_json:
            _show_queries(session, facts)
    facts["seconds"] = round(time.monotonic() - start, 1)
    if session.out.as_json:
        session.out.json(facts)
    elif settings.store != MEMORY:
        _show_next_steps(session, facts)
        if shows_console:
            await _show_console(session)


async def _remove_previous(session: Session) -> None:
    """Remove the store of an earlier demo; raise `InvalidRequest` for any other store."""
    if not _is_demo_store(session.store):
        return
    from postroom.adapters.compose import open_mailbox

    async with open_mailbox(session.store, MAILBOX):  # fails if another process uses it
        pass
    _remove(session.store)


def _remove(store: str) -> None:
    for suffix in FILES:
        with suppress(FileNotFoundError):
            Path(store + suffix).unlink()


def _is_demo_store(store: str) -> bool:
    """Return whether an earlier demo created the store; raise `InvalidRequest` if something else did."""
    from postroom.adapters.compose import list_mailboxes

    if not Path(store).exists():
        return False
    mailboxes = list_mailboxes(store)
    if mailboxes != [MAILBOX]:
        raise InvalidRequest(
            f"The store {store} was not created by the demo (it has {', '.join(mailboxes) or 'no mailbox'}); "
            "run the demo in an empty directory, or name a new file with --store."
        )
    return True


async def _traffic(session: Session, postroom: "SharedMailbox") -> dict[str, Any]:

    out = session.out
    for topic in TOPICS:
        await postroom.set_topic_policy(topic, POLICY)
    _heading(session, f"Sending {MESSAGES:,} messages over {len(TOPICS)} topics to two consumers")
    sender = Sender(postroom)
    first, second = Consumer(postroom, "consumer-1", HANGS_AFTER), Consumer(postroom, "consumer-2")
    start = time.monotonic()
    with out.progress("Sending and receiving", MESSAGES) as advance:
        async with asyncio.TaskGroup() as tasks:
            send_task = tasks.create_task(sender())
            first_task = tasks.create_task(first())
            tasks.create_task(second())
            while not send_task.done() or await _is_busy(postroom):
                if first.hangs.is_set():
                    first_task.cancel()
                advance(
                    first.acked + second.acked, f"{sender.sent:,} sent, {first.acked + second.acked:,} acked"
                )
                await asyncio.sleep(POLL_SECONDS)
            first.stop()
            second.stop()
    seconds = time.monotonic() - start
    dead = sum(shard.dead for shard in (await postroom.get_backlog()).shards)
    acked = first.acked + second.acked
    _print(session, f"{sender.sent:,} sent, {sender.duplicates:,} of them duplicates, in {seconds:.1f} s")
    _print(
        session,
        f"{first.name} was killed with {pluralize(len(first.unsettled), 'message')} in flight; "
        f"{second.name} received them again after {POLICY.visibility_ms / 1_000:g} s, and acknowledged them",
    )
    _print(
        session,
        f"{acked:,} acked; {dead} that can't be processed were dead-lettered after "
        f"{POLICY.max_attempts} attempts",
    )
    return {
        "sent": sender.sent,
        "duplicates": sender.duplicates,
        "acked": acked,
        "dead": dead,
        "redelivered": first.unsettled,
        "traffic_seconds": round(seconds, 1),
    }


async def _is_busy(postroom: "SharedMailbox") -> bool:
    backlog = await postroom.get_backlog()
    return any(shard.ready or shard.in_flight or shard.delayed for shard in backlog.shards)


def _rebuild(session: Session) -> dict[str, Any] | None:
    """Build the read models and return the report; print why and return None without the extra `views`."""
    _heading(session, "Rebuilding the read models")
    try:
        with explain_missing_extra("views"):
            from postroom.adapters.compose.projections import rebuild_projections

        with session.out.progress("Rebuilding") as advance:
            report = rebuild_projections(
                session.store, lambda at: advance(at.done, f"{at.phase} {at.done:,} {at.unit}")
            )
    except (Unavailable, MissingExtra) as error:
        _print(session, f"Skipped, as is the search: {error}")
        return None
    seconds = report.seconds["total"]
    _print(session, f"{report.rows['mailbox']:,} messages from {report.events:,} events in {seconds:.1f} s")
    facts: dict[str, Any] = msgspec.to_builtins(report)
    return facts


def _show_queries(session: Session, facts: dict[str, Any]) -> None:
    _heading(session, "Backlog: postroom backlog")
    backlog(session)
    _heading(session, "Dead letters: postroom dlq list --limit 5")
    list_dead_letters(session, limit=5)
    for message_id in facts["redelivered"][:1]:
        _heading(session, f"A message that was delivered twice: postroom show {message_id}")
        show(session, message_id)
    if facts["read_models"] is not None:
        _heading(session, "Search: postroom search --topic 'orders.*' --principal shop-lima --limit 5")
        with suppress(NotFound):
            search(session, topic=["orders.*"], principal=["shop-lima"], limit=5)


def _show_next_steps(session: Session, facts: dict[str, Any]) -> None:
    _heading(session, f"Done in {facts['seconds']} s. Try next")
    search_hint = "postroom search shop-osaka --status dead  # find messages by any header"
    for line in (
        f"export POSTROOM_STORE={session.store} POSTROOM_MAILBOX={MAILBOX}",
        "postroom dlq redrive orders.created       # return its dead letters to the queue",
        "postroom peek orders.created              # look at the next messages",
        "postroom recv orders.created --max 1      # receive one, with its receipt",
        *([search_hint] if facts["read_models"] is not None else []),
        "postroom verify                           # recompute all hashes of the log",
        "postroom console                          # see and do all of this in a browser",
        "postroom --help",
    ):
        session.out.line(f"  {line}")


async def _show_console(session: Session) -> None:
    try:
        from postroom.adapters.cli.console import CONSOLE_HTTP, serve_console
        from postroom.adapters.cli.serve import local_access
        from postroom.adapters.compose.console import ConsoleSettings

        _heading(session, "The same in a browser, until you press Ctrl-C: postroom console")
        await serve_console(session, CONSOLE_HTTP, ConsoleSettings(), local_access(session))
    except MissingExtra as error:
        _print(session, f"Skipped: {error}")


def _heading(session: Session, text: str) -> None:
    _print(session, f"\n== {text}")


def _print(session: Session, text: str) -> None:
    if not session.out.as_json:
        for line in text.split("\n"):
            session.out.line(line)
        session.out.flush()


MESSAGES = 20_000
TOPICS = ("orders.created", "orders.paid", "orders.shipped", "stock.changed", "mail.requested")
SHOPS = ("shop-berlin", "shop-lima", "shop-osaka")
DUPLICATES, POISON = 0.02, 0.001
BATCH = 100
SEED = 37
IDLE_SECONDS = 0.02


def generate(count: int = MESSAGES) -> Iterator[NewMessage]:
    """Yield `count` messages; some are duplicates, and some can't be processed."""
    random = Random(SEED)
    recent: list[NewMessage] = []
    for number in range(count):
        if recent and random.random() < DUPLICATES:
            yield random.choice(recent)
            continue
        customer = f"customer-{random.randrange(500)}"
        amount = round(random.uniform(1, 500), 2)
        if random.random() < POISON:
            amount = -amount
        order = {"order": number, "customer": customer, "amount": amount}
        message = NewMessage(
            topic=random.choice(TOPICS),
            payload=msgspec.json.encode(order),
            idem_key=f"order-{number}",
            sticky_key=customer,
            principal=random.choice(SHOPS),
            correlation_id=f"visit-{random.randrange(10**6):06}",
            content_type="application/json",
            attrs={"currency": "EUR"},
        )
        recent = [*recent[-20:], message]
        yield message


class Sender:
    """A sender of all messages in batches, which waits while the mailbox is saturated."""

    def __init__(self, postroom: "SharedMailbox", count: int = MESSAGES) -> None:
        self._postroom = postroom
        self._count = count
        self.sent = self.duplicates = 0

    async def __call__(self) -> None:
        """Send until all messages are accepted."""
        messages = list(generate(self._count))
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            while batch:
                answers = await self._postroom.send_batch(batch)
                remaining = [
                    message
                    for message, answer in zip(batch, answers, strict=True)
                    if isinstance(answer, Saturated)
                ]
                for answer in answers:
                    self._count_answer(answer)
                if remaining:
                    await asyncio.sleep(IDLE_SECONDS)
                batch = remaining

    def _count_answer(self, answer: object) -> None:
        if isinstance(answer, Rejected):
            if not isinstance(answer, Saturated):
                raise answer
            return
        self.sent += 1
        self.duplicates += answer.duplicate  # type: ignore[attr-defined]


class Consumer:
    """A consumer that acks messages, and nacks the ones that fail.

    Arguments:
        hangs_after: stop after this many messages, with the next batch in flight; None never stops.
    """

    def __init__(self, postroom: "SharedMailbox", name: str, hangs_after: int | None = None) -> None:
        self._postroom = postroom
        self._hangs_after = hangs_after
        self.name = name
        self.acked = self.nacked = 0
        self.unsettled: list[str] = []
        self.hangs = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        """Return from `__call__` once all that was received is settled and counted."""
        self._stopped = True

    async def __call__(self) -> None:
        """Process messages until stopped."""
        while not self._stopped:
            idle = True
            for topic in TOPICS:
                messages = await self._postroom.receive_messages(
                    topic, max_messages=BATCH, consumer=self.name
                )
                if messages:
                    idle = False
                    await self._process(messages)
            if idle:
                await asyncio.sleep(IDLE_SECONDS)

    async def _process(self, messages: "list[ReceivedMessage]") -> None:
        if self._hangs_after is not None and self.acked >= self._hangs_after:
            self.unsettled = [message.message_id for message in messages]
            self.hangs.set()
            await asyncio.Event().wait()
        receipts = []
        for message in messages:
            amount = msgspec.json.decode(message.payload)["amount"]
            if amount >= 0:
                receipts.append(message.receipt)
                continue
            self.nacked += 1
            reason = f"amount {amount} is negative"
            await self._postroom.nack_messages([message.receipt], reason=reason)
        self.acked += (await self._postroom.ack_messages(receipts)).count(None)
