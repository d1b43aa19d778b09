"""A namespace in one store, whose mailboxes are owned by processes of `postroom own` (ADR 0137)."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import InvalidRequest, Mailbox, NewMessage, NotFound, Sent, connect, open_mailbox
from postroom.adapters.compose import OwnerSettings, list_mailboxes
from postroom.adapters.compose.store import open_store
from postroom.adapters.compose.store_namespace import StoreNamespace, create_namespace
from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import cancel_and_wait
from tests.support.waiting import SECONDS, until_answer

SCRIPT = Path(sys.executable).with_name("postroom")
RELAXED = OwnerSettings(durability="relaxed")
KEYS = [f"key-{number}" for number in range(40)]


@pytest.fixture(params=["sqlite", "postgres", "jetstream"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "sqlite":
        return str(request.getfixturevalue(f"{request.param}_store"))
    return str(tmp_path / "store.db")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def keyed(topic: str = "orders", text: str = "") -> list[NewMessage]:
    return [
        NewMessage(topic=topic, payload=f"{key} {text}".encode(), sticky_key=key, idem_key=f"{key} {text}")
        for key in KEYS
    ]


async def send_all(mailbox: Mailbox, messages: list[NewMessage]) -> list[bool]:
    """Send messages; return whether each was a duplicate."""
    answers = await mailbox.send_batch(messages)
    assert all(isinstance(each, Sent) for each in answers), answers
    return [isinstance(each, Sent) and each.duplicate for each in answers]


async def receive_all(mailbox: Mailbox, count: int, topic: str = "orders") -> list[bytes]:
    """Receive and ack messages; return their payloads."""
    payloads: list[bytes] = []
    async with asyncio.timeout(SECONDS):
        while len(payloads) < count:
            received = await mailbox.receive_messages(topic, wait_ms=1_000)
            assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * len(received)
            payloads += [each.payload for each in received]
    return payloads


async def ready_by_mailbox(store: str, names: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for name in names:
        async with connect(store, name) as mailbox:
            counts[name] = (await mailbox.get_backlog()).ready
    return counts


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("POSTROOM_")}


async def run(store: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run a command; return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        SCRIPT, *arguments, "--store", store, cwd=Path.cwd(), env=environment(), stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(SECONDS):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@asynccontextmanager
async def owning(store: str, namespace: str, count: int) -> AsyncIterator[Process]:
    """Run `postroom own` until it owns all mailboxes."""
    process = await asyncio.create_subprocess_exec(
        SCRIPT, "own", "--mailbox", namespace, "--owners", str(count), "--store", store, "--json",
        "--durability", "relaxed", env=environment(), stdout=PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            assert json.loads(await process.stdout.readline())["namespace"] == namespace
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(SECONDS):
                await process.wait()


async def owners_of(store: str, names: tuple[str, ...]) -> dict[str, int | None]:
    """Return the ids of the processes of `postroom own` by mailbox; None without one."""
    ownership = open_store(store).ownership()
    owners = [await ownership.owner(name) or "" for name in names]
    return {
        name: int(owner.split()[3]) if owner.startswith("postroom own, process ") else None
        for name, owner in zip(names, owners, strict=True)
    }


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- keys ---


async def test_a_key_has_one_mailbox_whatever_the_settings_of_the_processes_that_send(any_store: str) -> None:
    names = await create_namespace(any_store, "shop", 4, RELAXED)
    async with AsyncExitStack() as owned:
        for name in names:
            await owned.enter_async_context(open_mailbox(any_store, name, durability="relaxed"))
        program = (
            "import sys; from postroom import NewMessage, connect\n"
            "with connect(sys.argv[1], 'shop', timeout_ms=60_000, owner_timeout_ms=900, durability='relaxed',"
            " owner='another') as mailbox:\n"
            f"    for key in {KEYS}:\n"
            "        sent = mailbox.send_message(NewMessage(topic='orders', payload=f'{key} '.encode(),"
            " sticky_key=key, idem_key=f'{key} '))\n"
            "        assert not sent.duplicate\n"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, any_store)
        async with asyncio.timeout(SECONDS):
            assert await process.wait() == 0
        before = await ready_by_mailbox(any_store, names)
        async with connect(any_store, "shop") as mailbox:
            assert all(await send_all(mailbox, keyed()))
            assert await ready_by_mailbox(any_store, names) == before
            assert all(before.values()), "each mailbox has some of the keys"
            assert sum(before.values()) == len(KEYS)


async def test_messages_of_a_key_are_received_in_their_order(store: str) -> None:
    names = await create_namespace(store, "shop", 3, RELAXED)
    async with connect(store, "shop", durability="relaxed") as mailbox:
        for round_ in range(3):
            await send_all(mailbox, keyed(text=str(round_)))
        received = await receive_all(mailbox, 3 * len(KEYS))
    rounds: dict[bytes, list[bytes]] = {}
    for payload in received:
        key, _, round_text = payload.partition(b" ")
        rounds.setdefault(key, []).append(round_text)
    assert rounds == {key.encode(): [b"0", b"1", b"2"] for key in KEYS}
    assert len(names) == 3


async def test_a_waiting_receive_gets_a_message_of_any_mailbox_and_no_more_than_it_asked_for(
    store: str,
) -> None:
    await create_namespace(store, "shop", 4, RELAXED)
    async with connect(store, "shop", durability="relaxed") as mailbox:
        for key in KEYS[:12]:
            waiting = asyncio.create_task(mailbox.receive_messages("orders", max_messages=1, wait_ms=60_000))
            await asyncio.sleep(0)
            both = [NewMessage(topic="orders", payload=b"1", sticky_key=each) for each in (key, key + "b")]
            await mailbox.send_batch(both)
            async with asyncio.timeout(SECONDS):
                (first,) = await waiting
                (second,) = await mailbox.receive_messages("orders", wait_ms=60_000)
            assert (first.attempt, second.attempt) == (1, 1)
            await mailbox.ack_messages([first.receipt, second.receipt])


async def test_a_waiting_receive_waits_where_another_one_no_longer_does(store: str) -> None:
    await create_namespace(store, "shop", 4, RELAXED)
    async with connect(store, "shop", durability="relaxed") as mailbox:
        for key in KEYS[:8]:
            receives = [
                asyncio.create_task(mailbox.receive_messages("orders", max_messages=1, wait_ms=60_000))
                for _ in range(3)
            ]
            while receives:  # all messages are of one mailbox
                await mailbox.send_message(NewMessage(topic="orders", payload=b"1", sticky_key=key))
                async with asyncio.timeout(SECONDS):
                    (first,), _ = await asyncio.wait(receives, return_when=asyncio.FIRST_COMPLETED)
                receives.remove(first)
                (message,) = first.result()
                await message.ack()


async def test_a_receive_that_is_cancelled_leaves_its_messages_ready(store: str) -> None:
    await create_namespace(store, "shop", 4, RELAXED)
    async with connect(store, "shop", durability="relaxed") as mailbox:
        for number in range(40):
            waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=60_000))
            sending = asyncio.create_task(send_all(mailbox, keyed(text=str(number))[:8]))
            for _ in range(number):
                await asyncio.sleep(0)
            await cancel_and_wait(waiting)
            await sending
            if not waiting.cancelled():
                await mailbox.ack_messages([each.receipt for each in waiting.result()])
            await until_answer(lambda: _has_none_in_flight(mailbox))
            await mailbox.purge_topic("orders")


async def _has_none_in_flight(mailbox: Mailbox) -> bool:
    return not sum(row.in_flight for row in (await mailbox.get_backlog()).shards)


async def test_what_a_receive_had_taken_when_it_was_cancelled_is_ready_again() -> None:
    asked = asyncio.Event()

    class Silent:
        """A mailbox that does not answer receives."""

        name = "shop@2-of-2"

        async def receive_messages(self, *_: object, **__: object) -> list[ReceivedMessage]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError("it waits until it is cancelled")

    async with open_mailbox("memory:", "shop@1-of-2") as first:
        members: Any = {first.name: first, Silent.name: Silent()}
        mailbox = StoreNamespace("shop", members, 60_000)
        await first.send_message(NewMessage(topic="orders", payload=b"1"))
        taken = 0
        for _ in members:  # the second receive begins with the other mailbox
            asked.clear()
            receiving = asyncio.create_task(mailbox.receive_messages("orders", max_messages=10))
            async with asyncio.timeout(SECONDS):
                await asked.wait()
            (before,) = (await first.get_backlog()).shards
            await cancel_and_wait(receiving)
            (after,) = (await first.get_backlog()).shards
            assert (after.ready, after.in_flight) == (1, 0)
            taken += before.in_flight
        assert taken == 1


# -- creation ---


async def test_the_number_of_mailboxes_can_not_be_changed(any_store: str) -> None:
    await create_namespace(any_store, "shop", 2, RELAXED)
    assert await create_namespace(any_store, "shop", None, RELAXED) == ("shop@1-of-2", "shop@2-of-2")
    with pytest.raises(InvalidRequest, match="has 2 mailboxes, not 3; their number can't be changed"):
        await create_namespace(any_store, "shop", 3, RELAXED)
    assert list_mailboxes(any_store) == ["shop@1-of-2", "shop@2-of-2"]


async def test_of_processes_that_create_a_namespace_with_different_numbers_one_comes_first(
    any_store: str,
) -> None:
    answers = await asyncio.gather(
        *(create_namespace(any_store, "shop", count, RELAXED) for count in (2, 3, 4)), return_exceptions=True
    )
    created = [each for each in answers if isinstance(each, tuple)]
    assert len(created) == 1
    assert sum(isinstance(each, InvalidRequest) for each in answers) == 2
    assert tuple(list_mailboxes(any_store)) == created[0]


async def test_a_creation_that_was_interrupted_is_completed_by_whoever_connects(store: str) -> None:
    async with open_mailbox(store, "shop@2-of-3"):
        pass
    async with connect(store, "shop") as mailbox:
        await send_all(mailbox, keyed())
        assert len(await receive_all(mailbox, len(KEYS))) == len(KEYS)
    assert list_mailboxes(store) == ["shop@1-of-3", "shop@2-of-3", "shop@3-of-3"]


async def test_a_namespace_that_does_not_exist_is_named_with_what_to_do(store: str) -> None:
    with pytest.raises(NotFound, match="no namespace shop; create it with postroom own"):
        async with connect(store, "shop"):
            pass
    with pytest.raises(InvalidRequest, match="in memory"):
        await create_namespace("memory:", "shop", 2)
    with pytest.raises(InvalidRequest, match="at most 64; it was 65"):
        await create_namespace(store, "shop", 65)


async def test_mailboxes_of_two_numbers_are_refused(store: str) -> None:
    for name in ("shop@1-of-2", "shop@1-of-3"):
        async with open_mailbox(store, name):
            pass
    with pytest.raises(InvalidRequest, match="are of 2 and 3"):
        async with connect(store, "shop"):
            pass


@pytest.mark.parametrize("name", ["shop@9-of-2", "shop@1-of-65", f"shop@1-of-{10**99}"])
async def test_a_mailbox_that_no_creation_names_so_is_of_no_namespace(store: str, name: str) -> None:
    async with open_mailbox(store, name):
        pass
    with pytest.raises(NotFound, match="has no namespace shop"):
        async with connect(store, "shop"):
            pass
    assert len(await create_namespace(store, "shop", 3, RELAXED)) == 3


@pytest.mark.parametrize("name", ["köln-50%", "a'\";--", "..", "$audit", "-x", "1-of-2", "x" * 128, "日本"])
async def test_tenants_with_hostile_names_share_a_store_and_nothing_else(any_store: str, name: str) -> None:
    await create_namespace(any_store, name, 2, RELAXED)
    await create_namespace(any_store, "shop", 3, RELAXED)
    async with (
        connect(any_store, name, durability="relaxed") as hostile,
        connect(any_store, "shop", durability="relaxed") as shop,
    ):
        await send_all(hostile, keyed(text="theirs"))
        await send_all(shop, keyed(text="ours"))
        assert hostile.name == name
        assert {each.split()[1] for each in await receive_all(hostile, len(KEYS))} == {b"theirs"}
        assert {each.split()[1] for each in await receive_all(shop, len(KEYS))} == {b"ours"}


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "a\n", "x" * 129, "\ud800"])
async def test_a_malformed_name_is_refused(store: str, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await create_namespace(store, name, 2)
    with pytest.raises(InvalidRequest):
        async with connect(store, name):
            pass


# -- processes ---


@pytest.mark.extended
async def test_each_mailbox_has_a_process_and_one_that_dies_is_replaced_while_the_others_go_on(
    any_store: str,
) -> None:
    names = ("shop@1-of-2", "shop@2-of-2")
    async with owning(any_store, "shop", 2), connect(any_store, "shop", timeout_ms=120_000) as mailbox:
        before = await owners_of(any_store, names)
        assert len({*before.values()} - {None}) == 2
        await send_all(mailbox, keyed(text="before"))
        dead = before[names[0]]
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        await send_all(mailbox, keyed(text="after"))
        assert Counter(await receive_all(mailbox, 2 * len(KEYS))).most_common(1)[0][1] == 1

        async def is_replaced() -> bool:
            owner = (await owners_of(any_store, names))[names[0]]
            return owner not in (None, dead)

        await until_answer(is_replaced)
        assert (await owners_of(any_store, names))[names[1]] == before[names[1]]
        await send_all(mailbox, keyed(text="at last"))
        assert len(await receive_all(mailbox, len(KEYS))) == len(KEYS)


@pytest.mark.extended
async def test_own_takes_mailboxes_over_from_a_process_that_came_first(any_store: str) -> None:
    names = await create_namespace(any_store, "shop", 2, RELAXED)
    async with connect(any_store, "shop", timeout_ms=120_000) as mailbox:
        await send_all(mailbox, keyed(text="first"))
        assert {*(await owners_of(any_store, names)).values()} == {None}
        async with owning(any_store, "shop", 2):
            assert None not in (await owners_of(any_store, names)).values()
            await send_all(mailbox, keyed(text="second"))
            assert len(await receive_all(mailbox, 2 * len(KEYS))) == 2 * len(KEYS)
            assert None not in (await owners_of(any_store, names)).values()
        await send_all(mailbox, keyed(text="third"))


@pytest.mark.extended
async def test_no_owner_outlives_a_command_that_was_killed(store: str) -> None:
    names = ("shop@1-of-2", "shop@2-of-2")
    async with owning(store, "shop", 2) as command:
        owners = [pid for pid in (await owners_of(store, names)).values() if pid is not None]
        assert len(owners) == 2
        command.kill()
        await command.wait()

        async def have_ended() -> bool:
            return not any(map(is_running, owners))

        await until_answer(have_ended)
    async with connect(store, "shop") as mailbox:
        await send_all(mailbox, keyed())


@pytest.mark.extended
async def test_commands_address_a_namespace_by_its_name(store: str) -> None:
    async with owning(store, "shop", 2):
        for key in KEYS[:6]:
            code, _, errors = await run(store, "send", "orders", "{}", "--key", key, "--mailbox", "shop")
            assert code == 0, errors
        code, output, _ = await run(store, "topic", "list", "--mailbox", "shop", "--json")
        assert [(each["topic"], each["ready"]) for each in json.loads(output)["topics"]] == [("orders", 6)]
        code, output, _ = await run(store, "peek", "orders", "--mailbox", "shop", "--json")
        assert len(output.splitlines()) == 6
        code, output, _ = await run(store, "backlog", "--mailbox", "shop", "--json")
        assert sum(s["ready"] for each in json.loads(output)["mailboxes"] for s in each["shards"]) == 6
        code, output, _ = await run(store, "recv", "orders", "--mailbox", "shop", "--json")
        received = [json.loads(line) for line in output.splitlines()]
        assert len(received) == 6
        first, *rest = (each["receipt"] for each in received)
        assert (await run(store, "nack", first, "--action", "reject", "--mailbox", "shop"))[0] == 0
        assert (await run(store, "ack", *rest, "--mailbox", "shop"))[0] == 0
        code, output, _ = await run(store, "dlq", "list", "--mailbox", "shop", "--json")
        assert len(json.loads(output)["dead_letters"]) == 1
        assert (await run(store, "dlq", "redrive", "orders", "--mailbox", "shop"))[0] == 0
        assert (await run(store, "topic", "pause", "orders", "--mailbox", "shop"))[0] == 0
        code, _, errors = await run(store, "log", "show", "--mailbox", "shop")
        assert code
        assert "shop is a namespace; name one of its" in errors
    code, _, errors = await run(store, "own", "--mailbox", "shop", "--owners", "3")
    assert code == 2
    assert "has 2 mailboxes, not 3" in errors
    code, _, errors = await run(store, "own", "--mailbox", "shop@a", "--owners", "3")
    assert code == 2
    assert "is for a namespace, and shop@a is one mailbox" in errors
    code, _, errors = await run(store, "topic", "list", "--mailbox", "shops")
    assert code == 3
    assert "has no namespace shops" in errors
