"""The host of a process: checks, protection of memory from disks (svc-mailbox I-9), the service manager."""

import asyncio
import ctypes
import math
import os
import platform
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from postroom.application.diagnosis import Check, Finding
from postroom.application.extras import EXTRAS
from postroom.application.telemetry import logger
from postroom.application.version import own_version

MIN_FILES = 4_096
MIN_JAVA = 17
JAVA_SECONDS = 30.0
UNSYNCHRONIZED = 5
"""What `adjtimex` returns while nothing adjusts the clock (TIME_ERROR)."""
_TIMEX_BYTES = 512
"""More than the size of `struct timex` on every platform."""


def host_checks() -> list[Check]:
    """Return the checks of this machine."""
    return [
        Check("versions", check_versions),
        Check("extras", check_extras),
        Check("java", check_java),
        Check("open files", check_open_files),
        Check("clock", check_clock),
    ]


def check_versions() -> Iterator[Finding]:
    """Find the versions of Postroom, and of the systems that it runs on."""
    names = f"Postroom {own_version()}, Python {platform.python_version()}"
    yield Finding("versions", "ok", f"{names}, SQLite {sqlite3.sqlite_version}")


def check_extras() -> Iterator[Finding]:
    """Find the extras whose packages are not installed, without importing any."""
    missing = sorted({extra for module, extra in EXTRAS.items() if find_spec(module) is None})
    if not missing:
        yield Finding("extras", "ok", "all are installed")
    else:
        advice = f"If you need one: pip install 'postroom[{','.join(missing)}]'."
        yield Finding("extras", "ok", f"not installed: {', '.join(missing)}", advice)


def check_java() -> Iterator[Finding]:
    """Find Spark and the Java that it would start."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        spark = f"PySpark {version('pyspark')}"
    except PackageNotFoundError:
        yield Finding("java", "ok", "PySpark is not installed; only the engine spark needs it")
        return
    java = _java()
    advice = "Install a JDK (such as openjdk-17-jre-headless), or set JAVA_HOME."
    if java is None:
        yield Finding("java", "warning", f"{spark} has no Java, which the engine spark needs", advice)
        return
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("java", "warning", f"{java} can't be run: {error}", advice)
        return
    match = re.search(r'version "(\d+)', done.stderr)
    if match is None or int(match[1]) < MIN_JAVA:
        first = (done.stderr.splitlines() or ["nothing"])[0]
        yield Finding("java", "warning", f"{java} says {first}; Spark needs {MIN_JAVA}", advice)
    else:
        yield Finding("java", "ok", f"{spark}, Java {match[1]}")


def check_open_files() -> Iterator[Finding]:
    """Find the limit of open files, which bounds connections."""
    import resource  # only on POSIX

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        advice = "Raise it: ulimit -n 65536, or LimitNOFILE= of the systemd unit."
        yield Finding("open files", "warning", f"at most {soft:,}; each connection takes one", advice)
    else:
        yield Finding(
            "open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
        )


def check_clock() -> Iterator[Finding]:
    """Find whether a service synchronizes the clock of this machine."""
    state = _clock_state()
    if state == UNSYNCHRONIZED:
        advice = "Run chrony or systemd-timesyncd: due times and expiry follow the clock."
        yield Finding("clock", "warning", "the kernel's clock is not synchronized", advice)
    elif state is None:
        yield Finding("clock", "ok", "whether it is synchronized can't be seen here")
    else:
        yield Finding("clock", "ok", "synchronized")


def _clock_state() -> int | None:
    """Return the kernel's state of the clock; None where it can't be asked."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))  # zeroed: it only reads
    return None if state < 0 else state


def _java() -> str | None:
    """Return the Java that Spark would start; see `postroom.projections.spark.session.find_java`."""
    home = os.environ.get("JAVA_HOME")
    if home is not None:
        return str(Path(home) / "bin" / "java")
    own = Path(sys.prefix) / "jdk" / "bin" / "java"
    return shutil.which("java") or (str(own) if own.exists() else None)


_PR_SET_DUMPABLE = 4
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_M_PERTURB = -6
_PERTURB_BYTE = 0xFF
_CAP_IPC_LOCK = 1 << 14


def protect_memory() -> list[str]:
    """Keep the memory of this process off every disk as far as the system permits.

    The process dumps no core, writes no bytecode, locks its memory against swapping, and has the C library
    overwrite freed memory.

    Returns: a sentence for each protection that the system does not permit.
    """
    sys.dont_write_bytecode = True
    library = ctypes.CDLL(None, use_errno=True)
    protections: tuple[tuple[Callable[[ctypes.CDLL], bool], str], ...] = (
        (_disable_core_dumps, "Core dumps can't be disabled on this system."),
        (
            _lock_memory,
            "Memory is not locked, so it may be swapped; give the process the capability IPC_LOCK.",
        ),
        (
            _overwrite_freed_memory,
            "Freed memory is not overwritten: the C library of this system can't do it.",
        ),
    )
    return [sentence for protect, sentence in protections if not protect(library)]


def _disable_core_dumps(library: ctypes.CDLL) -> bool:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit is ignored where a core is piped to a program, such as systemd-coredump.
    return hasattr(library, "prctl") and library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def _lock_memory(library: ctypes.CDLL) -> bool:
    """Lock all pages when they are first used.

    If memory locking has a limit, allocations beyond it would fail, so memory is not locked then.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not _may_lock_any():
        return False
    flags = _MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT
    return hasattr(library, "mlockall") and library.mlockall(flags) == 0


def _may_lock_any() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) & _CAP_IPC_LOCK)


def _overwrite_freed_memory(library: ctypes.CDLL) -> bool:
    return hasattr(library, "mallopt") and library.mallopt(_M_PERTURB, _PERTURB_BYTE) == 1


WATCHDOG_SHARE = 3
"""Messages in the time after which systemd takes a silent process for hung."""


class ServiceManager:
    """The service manager, such as systemd; without one, messages are dropped.

    Arguments:
        environment: variables with the address of its socket, and how often it expects to hear from the
            process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = environment.get("WATCHDOG_USEC", "") if own else ""
        self._watchdog_us = int(interval) if interval.isdecimal() else 0

    def ready(self) -> None:
        """Say that the command has started, or has reloaded."""
        self._notify("READY=1")

    def reloading(self) -> None:
        """Say that a reload begins."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1_000}")

    def stopping(self) -> None:
        """Say that the command ends."""
        self._notify("STOPPING=1")

    async def watch(self) -> None:
        """Say that the event loop is healthy, as often as the service manager asks, until cancelled."""
        pause = self._watchdog_us / 1_000_000 / WATCHDOG_SHARE or math.inf
        while self._address and pause < math.inf:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(pause)

    def _notify(self, message: str) -> None:
        if not self._address:
            return
        # A name that begins with @ is in Linux's abstract namespace.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError as error:  # the command continues; a service manager without notifications restarts it
            logger().retry("service_manager.unreachable", error=str(error))
