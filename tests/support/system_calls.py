"""Traces of the system calls by which a process could write to a disk."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

STRACE = shutil.which("strace")
CALLS = (
    "open,openat,openat2,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
    "truncate,ftruncate,fallocate,unlink,unlinkat,rmdir,mknod,mknodat,io_uring_setup,mmap,bind,mlockall,prctl"
)
_LINE = re.compile(r"^\d+ +(?P<call>\w+)\((?P<arguments>.*)")
_WRITING = re.compile(r"\b(O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND|O_TMPFILE)\b")
_DEVICE = re.compile(r'^[^"]*"/dev/(?!shm/)')
_CHANGES = frozenset(CALLS.split(",")) - {
    *("open", "openat", "openat2", "io_uring_setup", "mmap", "bind", "mlockall", "prctl")
}


def tracer(log: Path) -> list[str | Path]:
    """Return the command that runs another one, and logs the system calls of all its threads.

    The tracer is no parent of the process, which so has the id and the exit of the one that was started.
    """
    assert STRACE is not None
    return [STRACE, "-D", "-f", "-y", "-q", "--seccomp-bpf", "-s", "256", "-e", f"trace={CALLS}", "-o", log]


def writes(log: str) -> Iterator[str]:
    """Yield the calls that write, or make or remove a file, outside /dev and sockets of the network.

    What goes through a ring is not traced: libuv uses one without a polling thread (SQPOLL) for epoll alone,
    and one with it for files, which counts as a write.
    """
    for line in log.splitlines():
        parts = _LINE.match(line)
        if parts is not None and _is_write(parts["call"], parts["arguments"]):
            yield line


def _is_write(call: str, arguments: str) -> bool:
    if call in ("open", "openat", "openat2"):
        return _WRITING.search(arguments) is not None and _DEVICE.match(arguments) is None
    if call == "mmap":  # of a file: its descriptor is shown with a path
        is_shared = "MAP_SHARED" in arguments and "PROT_WRITE" in arguments
        return (
            is_shared and re.search(r"\d<(?!/dev/(?!shm/)|/memfd:|anon_inode:)[^>]*>", arguments) is not None
        )
    if call == "bind":
        return "AF_UNIX" in arguments and 'sun_path=@"' not in arguments
    return call in _CHANGES or "IORING_SETUP_SQPOLL" in arguments
