"""The ownership conformance suite on every adapter, and what only a file lock can promise."""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.adapters.memory.ownership import MemoryOwnership
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.domain.errors import MailboxOwned
from tests.conformance.ownership import ONE, PATIENT_MS, OwnershipConformance


class TestMemoryOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self) -> MemoryOwnership:
        return MemoryOwnership()


class TestFileOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self, tmp_path: Path) -> FileOwnership:
        return FileOwnership(tmp_path / "store.db")


OWN_UNTIL_KILLED = """
import asyncio, sys
from postroom.adapters.sqlite.ownership import FileOwnership

async def own():
    async with FileOwnership(sys.argv[1]).acquire("acme@one", "the other process", 0):
        print("owned", flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Return a process that owns the mailbox."""
    command = [sys.executable, "-c", OWN_UNTIL_KILLED, str(tmp_path / "store.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


async def test_another_process_is_turned_away_until_the_owner_is_killed(
    tmp_path: Path, other_process: "subprocess.Popen[str]"
) -> None:
    ownership = FileOwnership(tmp_path / "store.db")
    with pytest.raises(MailboxOwned, match="owned by the other process"):
        async with ownership.acquire(ONE, "this process", 0):
            pytest.fail("owned twice")
    other_process.kill()
    async with ownership.acquire(ONE, "this process", PATIENT_MS):
        pass


async def test_a_long_name_of_an_owner_before_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    ownership = FileOwnership(tmp_path / "store.db")
    async with ownership.acquire(ONE, "a name that is quite long", 0):
        pass
    async with ownership.acquire(ONE, "short", 0):
        with pytest.raises(MailboxOwned) as refused:
            async with ownership.acquire(ONE, "third", 0):
                pytest.fail("owned twice")
    assert refused.value.owner == "short"


async def test_the_lock_file_is_for_its_owner_only(tmp_path: Path) -> None:
    async with FileOwnership(tmp_path / "store.db").acquire(ONE, "first", 0):
        pass
    (file,) = list(tmp_path.iterdir())  # noqa: ASYNC240  nothing else runs in this loop
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
