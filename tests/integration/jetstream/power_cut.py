"""What a power cut leaves on the disks of servers: what they had synced, by their system calls."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.servers.server import LoopbackServer
from tests.support.system_calls import STRACE
from tests.support.waiting import SECONDS, wait_until

CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,renameat,unlinkat"
_LINE = re.compile(r"^(?P<thread>\d+) +(?P<call>\w+)\((?P<rest>.*)$")
_RESUMED = re.compile(r"^(?P<thread>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)$")
_UNFINISHED = " <unfinished ...>"
_OF_FILE = re.compile(r"^\d+<(?P<path>[^>]*)>")
_PWRITE = re.compile(r", (?P<offset>\d+)\) += (?P<count>\d+)$")
_RESULT = re.compile(r"\) += (?P<result>\d+)")
_RENAME = re.compile(r'^AT_FDCWD<[^>]*>, "(?P<old>[^"]*)", AT_FDCWD<[^>]*>, "(?P<new>[^"]*)"')
_UNLINK = re.compile(r'^AT_FDCWD<[^>]*>, "(?P<path>[^"]*)"')
_OPENED = re.compile(r", (?P<flags>O_[A-Z_|]*)(, \d+)?\) += \d+<(?P<path>[^>]*)>")


class PowerCut:
    """The files of one server, of which all that was not synced is lost.

    A sync counts for what was written to the file before it began. Names of files count as synced.

    Arguments:
        folder: where the server stores.
        trace: file for its system calls.
    """

    def __init__(self, folder: Path, trace: Path) -> None:
        self._folder = folder
        self.trace = trace
        self._written = {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        self._synced = dict(self._written)
        self._always: set[str] = set()

    def lose_what_is_not_synced(self) -> int:
        """Cut the files of a server that was killed to what it had synced; return how many bytes are lost."""
        self._replay()
        lost = 0
        for path in [path for path in self._folder.rglob("*") if path.is_file()]:
            size, synced = path.stat().st_size, self._synced.get(str(path))
            if synced is None:
                path.unlink()
            elif synced < size:
                with path.open("r+b") as file:
                    file.truncate(synced)
            lost += size - min(size, synced or 0)
        return lost

    def _replay(self) -> None:
        begun: dict[str, tuple[str, dict[str, int]]] = {}
        for line in self.trace.read_text(errors="replace").splitlines():
            if resumed := _RESUMED.match(line):
                before, written = begun.pop(resumed["thread"], ("", {}))
                self._apply(resumed["call"], before + resumed["rest"], written)
            elif call := _LINE.match(line):
                if call["rest"].endswith(_UNFINISHED):
                    begun[call["thread"]] = call["rest"].removesuffix(_UNFINISHED), dict(self._written)
                else:
                    self._apply(call["call"], call["rest"], self._written)

    def _apply(self, call: str, rest: str, written: dict[str, int]) -> None:
        """Apply a call that has ended; `written` is what was written to each file before it began."""
        file = _OF_FILE.match(rest)
        path = file["path"] if file else ""
        match call:
            case "openat" if opened := _OPENED.search(rest):
                path, flags = opened["path"], opened["flags"].split("|")
                if "O_TRUNC" in flags:
                    self._written[path] = 0
                (self._always.add if "O_SYNC" in flags else self._always.discard)(path)
            case "pwrite64" if done := _PWRITE.search(rest):
                self._write(path, int(done["offset"]) + int(done["count"]))
            case "write" if done := _RESULT.search(rest):
                self._write(path, self._written.get(path, 0) + int(done["result"]))
            case "fsync" | "fdatasync" if path in written and _RESULT.search(rest):
                self._synced[path] = written[path]
            case "renameat" if names := _RENAME.match(rest):
                for sizes in (self._written, self._synced):
                    sizes.pop(names["new"], None)
                    if names["old"] in sizes:
                        sizes[names["new"]] = sizes.pop(names["old"])
            case "unlinkat" if names := _UNLINK.match(rest):
                self._written.pop(names["path"], None)
                self._synced.pop(names["path"], None)

    def _write(self, path: str, size: int) -> None:
        self._written[path] = max(size, self._written.get(path, 0))
        if path in self._always:
            self._synced[path] = self._written[path]


@contextmanager
def traced(servers: Sequence[LoopbackServer], cuts: Sequence[PowerCut]) -> Iterator[None]:
    """Trace servers while the context lasts, or until they are killed; skip the test where none may."""
    tracers = []
    try:
        for server, cut in zip(servers, cuts, strict=True):
            options = ["-f", "-y", "-q", "-s", "512", "-e", f"trace={CALLS}", "-o", str(cut.trace)]
            command = [str(STRACE), *options, "-p", str(server.pid)]
            tracers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

        def has_failed() -> bool:
            return any(tracer.poll() is not None for tracer in tracers)

        wait_until(lambda: has_failed() or all(map(_is_traced, servers)))
        if has_failed():
            pytest.skip("this process may not trace another")
        yield
    finally:
        for tracer in tracers:
            tracer.terminate()
            tracer.wait(SECONDS)


def _is_traced(server: LoopbackServer) -> bool:
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{server.pid}/task").iterdir()]
    return all("TracerPid:\t0" not in status for status in statuses)
