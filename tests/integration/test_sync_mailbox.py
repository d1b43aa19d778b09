"""A mailbox used without an event loop: in threads, in scripts, and after a fork."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from postroom import InvalidRequest, NewMessage, StaleReceipt, SyncMailbox, Unavailable, connect

MESSAGE = NewMessage(topic="orders", payload=b"{}")

FORK = """
import os, sys
from postroom import InvalidRequest, NewMessage, connect

store = sys.argv[1]
message = NewMessage(topic="orders", payload=b"{}")
with connect(store) as mailbox:
    mailbox.send_message(message)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        try:
            mailbox.send_message(message)
        except InvalidRequest as error:
            assert "forked" in str(error)
            with connect(store) as own:
                own.send_message(message)
                os._exit(0 if own.get_backlog().ready == 2 else 2)
        os._exit(1)
"""

# The child lives until the pipe at its standard input is closed; the owner waits for a signal.
OWNER_WITH_CHILD = """
import os, signal, sys
from postroom import connect

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
with connect(sys.argv[1]):
    print("owns", flush=True)
    signal.sigwait([signal.SIGUSR1])
    if os.fork() == 0:
        print("forked", flush=True)
        os.read(0, 1)
        os._exit(0)
    signal.sigwait([signal.SIGUSR2])
print("closed", flush=True)
signal.pause()
"""

FORK_OF_ASYNCIO = """
import asyncio, os, sys
from postroom import InvalidRequest, NewMessage, connect, open_mailbox

def calls(mailbox):
    yield mailbox.send_message(NewMessage(topic="orders", payload=b""))
    yield mailbox.receive_messages("orders", wait_ms=1_000)
    yield mailbox.get_message("1")
    yield mailbox.explain_message("1")
    yield mailbox.get_backlog()
    yield mailbox.get_topic_policy("orders")
    yield mailbox.list_dead_letters()
    yield mailbox.peek_messages("orders")
    yield mailbox.delete_old_events(0)

async def main():
    async with open_mailbox(sys.argv[1]) as owner, connect(sys.argv[1]) as mailbox:
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            await mailbox.send_message(NewMessage(topic="orders", payload=b""))
            return
        for call in [*calls(owner), *calls(mailbox)]:
            try:
                call.send(None)
            except InvalidRequest as error:
                if "was opened before this process was forked" in str(error):
                    continue
            os._exit(1)
        os._exit(0)

asyncio.run(main())
"""

# The child outlives its parent, so that it would have to own the mailbox.
ORPHAN = """
import os, sys
from postroom import InvalidRequest, connect, open_mailbox, read_mailbox

def refusal(use):
    try:
        use()
    except InvalidRequest as error:
        return str(error)

def own():
    with connect(sys.argv[1], timeout_ms=20_000):
        pass

def read():
    with read_mailbox(sys.argv[1]):
        pass

reading, writing = os.pipe()
with connect(sys.argv[1]):
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)
        print([" was open in the process from which" in str(refusal(use)) for use in (own, read)], flush=True)
        os._exit(0)
"""

# The main thread ends first, then the other one, and the exit handler last.
EXIT = """
import atexit, sys, threading
from postroom import NewMessage, connect

message = NewMessage(topic="orders", payload=b"{}")
mailbox = connect(sys.argv[1]).sync()

def send():
    threading.main_thread().join()
    mailbox.send_message(message)
    with connect(sys.argv[1], "other@local") as other:
        other.send_message(message)

def close():
    mailbox.send_message(message)
    print(mailbox.get_backlog().ready)
    mailbox.close()

atexit.register(close)
threading.Thread(target=send).start()
"""


def test_a_message_is_sent_received_and_settled_without_an_event_loop(tmp_path: Path) -> None:
    with connect(str(tmp_path / "store.db")) as mailbox:
        mailbox.send_batch([NewMessage(topic="orders", payload=b'{"n": 1}')] * 3)
        first, second, third = mailbox.receive_messages("orders")
        assert (first.json(), first.topic, first.attempt) == ({"n": 1}, "orders", 1)
        first.ack()
        second.nack(reason="broken", delay_ms=0)
        third.extend(60_000)
        with pytest.raises(StaleReceipt):
            second.ack()
        assert mailbox.get_message(first.message_id).status == "acked"
        assert mailbox.get_message(second.message_id).last_error == "broken"


def test_threads_share_a_mailbox(tmp_path: Path) -> None:
    with connect(str(tmp_path / "store.db"), durability="relaxed") as mailbox:

        def send_and_receive(number: int) -> bytes:
            mailbox.send_message(NewMessage(topic=f"topic-{number}", payload=str(number).encode()))
            (received,) = mailbox.receive_messages(f"topic-{number}")
            received.ack()
            return received.payload

        with ThreadPoolExecutor(16) as pool:
            payloads = list(pool.map(send_and_receive, range(200)))
    assert payloads == [str(number).encode() for number in range(200)]


def test_a_closed_mailbox_says_so_and_can_be_closed_again(tmp_path: Path) -> None:
    mailbox: SyncMailbox = connect(str(tmp_path / "store.db")).sync()
    mailbox.close()
    mailbox.close()
    with pytest.raises(Unavailable, match="closed"):
        mailbox.send_message(NewMessage(topic="orders", payload=b""))


def test_threads_that_share_a_connection_close_their_own_mailboxes(tmp_path: Path) -> None:
    connection = connect(str(tmp_path / "store.db"))
    is_open, may_leave = threading.Event(), threading.Event()

    def use_and_leave() -> None:
        with connection:
            is_open.set()
            may_leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(use_and_leave)
        assert is_open.wait(60)
        with connection as mailbox:
            may_leave.set()
            other.result()
            mailbox.send_message(MESSAGE)


def test_threads_may_close_a_mailbox_at_the_same_time(tmp_path: Path) -> None:
    mailbox: SyncMailbox = connect(str(tmp_path / "store.db")).sync()
    with ThreadPoolExecutor(8) as pool:
        for closing in [pool.submit(mailbox.close) for _ in range(8)]:
            closing.result()


def test_a_mailbox_works_in_threads_and_exit_handlers_after_the_main_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT, str(tmp_path / "store.db")]
    assert subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE).stdout == b"2\n"


@pytest.mark.parametrize("options", [{"timeout_ms": 0}, {"owner_timeout_ms": 1}, {"mode": "stack"}])
def test_an_invalid_argument_is_refused_when_the_mailbox_is_opened(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest), connect(str(tmp_path / "store.db"), **options):  # type: ignore[arg-type]
        pytest.fail("opened")
    assert os.listdir(tmp_path) == []


def test_a_mailbox_without_awaits_says_in_a_coroutine_that_it_would_block_the_event_loop(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "store.db")

    async def connect_in_a_coroutine() -> None:
        with (
            pytest.raises(InvalidRequest, match=r"blocks the event loop; use `async with"),
            connect(store),
        ):
            pytest.fail("connected")

    asyncio.run(connect_in_a_coroutine())
    assert not os.path.exists(store)

    async def use_in_a_coroutine(mailbox: SyncMailbox) -> None:
        with pytest.raises(InvalidRequest, match="blocks the event loop"):
            mailbox.send_message(MESSAGE)
        await asyncio.to_thread(mailbox.send_message, MESSAGE)
        mailbox.close()  # as handlers of a program's end do

    with connect(store) as mailbox:
        asyncio.run(use_in_a_coroutine(mailbox))
        with pytest.raises(Unavailable, match="was closed"):
            mailbox.get_backlog()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_connects_anew_and_is_told_so(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path / "store.db")], check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_mailbox_of_coroutines_says_in_a_forked_process_that_it_does_not_work(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK_OF_ASYNCIO, str(tmp_path / "store.db")]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_does_not_open_the_file_that_was_open_in_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "store.db")]
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE)
    assert done.stdout == b"[True, True]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("end", ["killed", "closed"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_forked_process_keeps_no_mailbox_that_its_parent_has_left(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, end: str
) -> None:
    store = str(tmp_path / "s") if kind == "sqlite" else request.getfixturevalue("postgres_store")
    command = [sys.executable, "-c", OWNER_WITH_CHILD, store]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == b"owns\n"
            # Silence is no reason to replace an owner here: only locks and sockets that are released are.
            with connect(store, owner_timeout_ms=3_600_000, timeout_ms=20_000) as mailbox:
                mailbox.send_message(MESSAGE)
                owner.send_signal(signal.SIGUSR1)
                assert owner.stdout.readline() == b"forked\n"
                if end == "killed":
                    owner.kill()
                    owner.wait(60)
                else:
                    owner.send_signal(signal.SIGUSR2)
                    assert owner.stdout.readline() == b"closed\n"
                mailbox.send_message(MESSAGE)
                assert mailbox.get_backlog().ready == 2
        finally:
            owner.kill()
            owner.stdin.close()  # ends the child
