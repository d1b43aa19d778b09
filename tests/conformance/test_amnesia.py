"""A mailbox in memory leaves nothing on any disk (svc-mailbox I-9, G-6)."""

import subprocess
import sys
from pathlib import Path

# The audit hook sees every file that the interpreter opens, sqlite3 included.
WORKLOAD = """
import asyncio, os, sys

def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        print("opened for writing", arguments[0])
    elif event in {"sqlite3.connect", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"}:
        print(event, arguments)

from postroom.adapters.compose import open_mailbox
from postroom.application.messages import NewMessage

async def soak():
    async with open_mailbox(sys.argv[1]) as mailbox:
        for number in range(20):
            await mailbox.send_batch([NewMessage(topic="t", payload=bytes(1_000)) for _ in range(100)])
            received = await mailbox.receive_messages("t", max_messages=100)
            await mailbox.ack_messages([message.receipt for message in received[:50]])
            await mailbox.nack_messages([message.receipt for message in received[50:]], delay_ms=0)
        await mailbox.purge_topic("t", ready=True)
        await mailbox.retention.enforce_age()

async def main():
    sys.addaudithook(watch)
    await soak()
    print("done")

asyncio.run(main())
"""


def run(store: str, folder: Path) -> list[str]:
    """Run the workload in an empty folder and return what was seen to touch a disk."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", WORKLOAD, store],
        cwd=folder,
        env={"TMPDIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *seen, last = done.stdout.splitlines()
    assert last == "done"
    return seen


def test_a_workload_in_memory_opens_no_file_for_writing(tmp_path: Path) -> None:
    assert run("memory:", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_same_workload_on_a_store_is_seen_to_write(tmp_path: Path) -> None:
    assert f"opened for writing {tmp_path / 'store.db'}" in run("store.db", tmp_path)
