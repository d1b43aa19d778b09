"""A server process on loopback that ends with the process that started it."""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage

from postroom.domain.errors import Unavailable
from tests.support.fork_server import can_fork, popen

LOOPBACK = "127.0.0.1"
READY_SECONDS = 120.0
POLL_SECONDS = 0.01
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 6 << 30
"""Free memory from which on temporary files are kept there."""
_PR_SET_PDEATHSIG = 1


def memory_folder() -> Path | None:
    """Return a folder in memory, or None where there is no room or programs can't be run from it."""
    has_room = MEMORY.is_dir() and disk_usage(MEMORY).free >= MEMORY_BYTES
    return MEMORY if has_room and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC else None


def free_port() -> int:
    """Return a TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Tell whether somebody accepts connections at a port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0


class ServerProcess:
    """Run a server; it ends with this process, and where it is no fork, with the thread that started it."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, user: str | None = None) -> None:
        """Take the command line, the file its output goes to, and the user it runs as."""
        self._name = name
        self._command = command
        self._log = log
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return the id of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self, is_ready: Callable[[], bool], within: float = READY_SECONDS) -> None:
        """Start the server and wait until it is ready.

        Arguments:
            within: seconds it may take.

        Raises: Unavailable, with its last words, when it ends or takes longer.
        """
        with self._log.open("ab") as log:
            if self._user is None and can_fork(self._command):
                self._process = popen(self._command, stdout=log, stderr=subprocess.STDOUT)
            else:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    user=self._user,
                    group=self._user,
                    extra_groups=[] if self._user else None,
                    cwd="/" if self._user else None,
                    preexec_fn=end_with_parent,
                )
        deadline = time.monotonic() + within
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                words = self._log.read_text("utf-8", "replace")[-500:].strip()
                raise Unavailable(f"{self._name} did not start: {words or 'it wrote no output'}.")
            time.sleep(POLL_SECONDS)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ask the server to end, and wait until it has."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(how)
                self._process.send_signal(signal.SIGCONT)  # a paused one would not hear it
            try:
                self._process.wait(READY_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop every thread of the server, as a machine that is suspended or out of CPU would."""
        pause(self.pid)

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server and its own processes without warning, as a crash would."""
        children: list[int] = []
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)  # else it may start one more while we look for them
            children = _children(self.pid)
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        self.stop(signal.SIGKILL)
        deadline = time.monotonic() + READY_SECONDS
        while any(map(_runs, children)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # what they still hold, the next server would miss


def pause(pid: int) -> None:
    """Stop every thread of a process; those besides the one that gets the signal may go on for a while.

    Raises: Unavailable when they don't stop in time.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + READY_SECONDS
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        if time.monotonic() > deadline:
            raise Unavailable(f"Process {pid} did not stop.")
        time.sleep(POLL_SECONDS)


def _is_stopped(thread: Path) -> bool:
    try:
        return ") T " in (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True


def _children(pid: int) -> list[int]:
    """Return the processes that any thread of one started."""
    children = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in (thread / "children").read_text().split()]
    return children


def _runs(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that started it is gone; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
