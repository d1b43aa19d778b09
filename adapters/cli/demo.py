"""`postroom demo`: the whole story on an empty store, in under a minute."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from postroom.adapters.cli.operate import list_dead_letters
from postroom.adapters.cli.queues import backlog, show
from postroom.adapters.cli.search import search
from postroom.adapters.cli.session import MEMORY, Session
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.policy import TopicPolicy

if TYPE_CHECKING:
    from postroom.adapters.compose import Postroom

STORE, MAILBOX = "postroom-demo.db", "demo@local"
POLICY = TopicPolicy(visibility_ms=1_000, max_attempts=3, backoff_base_ms=50, backoff_max_ms=400)
HANGS_AFTER = 1_000
POLL_SECONDS = 0.1
FILES = ("", "-wal", "-shm", "-views", "-views-wal", "-views-shm", "-views-lock")


async def demo(session: Session) -> None:
    """Send 20,000 messages, receive them with two consumers, kill one, rebuild the read models, and search.

    It works in postroom-demo.db unless --store names another file, and leaves it for you to look around in.
    """
    from postroom.adapters.compose import is_database

    settings = msgspec.structs.replace(
        session.settings, store=session.settings.store or STORE, mailbox=MAILBOX
    )
    session = Session(session.command, settings, session.out)
    if is_database(session.store):
        raise InvalidRequest(
            "The demo fills a store of its own and empties it the next time, which it does not do to a "
            "database; run it without --store, or name a new file."
        )
    if settings.store != MEMORY:
        await _make_room(session)
    began = time.monotonic()
    facts: dict[str, Any] = {"store": settings.store, "mailbox": MAILBOX}
    async with session.own(create=True) as postroom:
        facts |= await _traffic(session, postroom)
    if settings.store == MEMORY:
        session.out.note(
            "Everything was in memory and is gone; without --store memory: there is more to see."
        )
    else:
        facts["read_models"] = await asyncio.to_thread(_rebuild, session)
        if not session.out.as_json:
            _look_around(session, facts)
    facts["seconds"] = round(time.monotonic() - began, 1)
    if session.out.as_json:
        session.out.json(facts)
    elif settings.store != MEMORY:
        _say_what_is_next(session, facts)


async def _make_room(session: Session) -> None:
    """Remove the store of an earlier demo; refuse any other."""
    if not _is_ours(session.store):
        return
    async with session.own():  # nobody else works with it
        pass
    _remove(session.store)


def _is_ours(store: str) -> bool:
    """Tell whether an earlier demo left its store here; raise `InvalidRequest` when somebody else did."""
    from postroom.adapters.compose import list_mailboxes

    if not Path(store).exists():
        return False
    present = list_mailboxes(store)
    if present != [MAILBOX]:
        raise InvalidRequest(
            f"The store {store} was not made by the demo (it has {', '.join(present) or 'no mailbox'}); "
            "run the demo in an empty directory, or name a new file with --store."
        )
    return True


def _remove(store: str) -> None:
    for suffix in FILES:
        with suppress(FileNotFoundError):
            Path(store + suffix).unlink()


async def _traffic(session: Session, postroom: "Postroom") -> dict[str, Any]:
    from postroom.adapters.cli.demo_traffic import MESSAGES, TOPICS, Consumer, Sender

    out = session.out
    for topic in TOPICS:
        await postroom.set_topic_policy(topic, POLICY)
    _heading(session, f"Sending {MESSAGES:,} messages over {len(TOPICS)} topics to two consumers")
    sender = Sender(postroom)
    first, second = Consumer(postroom, "consumer-1", HANGS_AFTER), Consumer(postroom, "consumer-2")
    began = time.monotonic()
    with out.progress("Sending and receiving", MESSAGES) as move:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(sender())
            victim, survivor = tasks.create_task(first()), tasks.create_task(second())
            while not sending.done() or _is_busy(postroom):
                if first.hangs.is_set():
                    victim.cancel()
                move(
                    first.acked + second.acked, f"{sender.sent:,} sent, {first.acked + second.acked:,} acked"
                )
                await asyncio.sleep(POLL_SECONDS)
            for consumer in (victim, survivor):
                consumer.cancel()
    seconds = time.monotonic() - began
    dead = sum(shard.dead for shard in postroom.get_backlog().shards)
    acked = first.acked + second.acked
    _say(session, f"{sender.sent:,} sent, {sender.duplicates:,} of them duplicates, in {seconds:.1f} s")
    _say(
        session,
        f"{first.name} hung with {len(first.held)} messages in hand and was killed; they came again after "
        f"{POLICY.visibility_ms / 1_000:g} s, and {second.name} settled them",
    )
    _say(
        session, f"{acked:,} acked; {dead} that nobody can process died after {POLICY.max_attempts} attempts"
    )
    return {
        "sent": sender.sent,
        "duplicates": sender.duplicates,
        "acked": acked,
        "dead": dead,
        "redelivered": first.held,
        "traffic_seconds": round(seconds, 1),
    }


def _is_busy(postroom: "Postroom") -> bool:
    return any(shard.ready or shard.in_flight or shard.delayed for shard in postroom.get_backlog().shards)


def _rebuild(session: Session) -> dict[str, Any] | None:
    """Build the read models; without Spark the demo goes on."""
    from postroom.adapters.compose import rebuild_projections

    _heading(session, "Rebuilding the read models with Spark")
    try:
        with session.out.progress("Starting Spark") as move:
            report = rebuild_projections(
                session.store, lambda at: move(at.done, f"{at.phase} {at.done:,} {at.unit}")
            )
    except Unavailable as error:
        session.out.note(f"{error} The demo goes on without search.")
        return None
    seconds = report.seconds["total"]
    _say(session, f"{report.rows['mailbox']:,} messages from {report.events:,} events in {seconds:.1f} s")
    facts: dict[str, Any] = msgspec.to_builtins(report)
    return facts


def _look_around(session: Session, facts: dict[str, Any]) -> None:
    _heading(session, "Backlog: postroom backlog")
    backlog(session)
    _heading(session, "Dead letters: postroom dlq list --limit 5")
    list_dead_letters(session, limit=5)
    for redelivered in facts["redelivered"][:1]:
        _heading(session, f"A message that was delivered twice: postroom show {redelivered}")
        show(session, redelivered)
    if facts["read_models"] is not None:
        _heading(session, "Search: postroom search --topic 'orders.*' --principal shop-lima --limit 5")
        with suppress(NotFound):
            search(session, topic=["orders.*"], principal=["shop-lima"], limit=5)


def _say_what_is_next(session: Session, facts: dict[str, Any]) -> None:
    _heading(session, f"Done in {facts['seconds']} s. Try next")
    for line in (
        f"export POSTROOM_STORE={session.store} POSTROOM_MAILBOX={MAILBOX}",
        "postroom dlq reprocess orders.created     # put its dead letters back",
        "postroom recv orders.created --max 1      # receive one, with its receipt",
        "postroom search shop-osaka --status dead  # find messages by any header",
        "postroom verify                           # recompute every hash of the log",
        "postroom --help",
    ):
        session.out.line(f"  {line}")


def _heading(session: Session, text: str) -> None:
    _say(session, f"\n== {text}")


def _say(session: Session, text: str) -> None:
    if not session.out.as_json:
        session.out.line(text)
        session.out.flush()
