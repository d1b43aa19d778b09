"""Protection of a process's memory from disks: core dumps, swap, and freed memory (svc-mailbox I-9).

Linux alone has all of it; what a system does not offer is reported, not raised.
"""

import ctypes
import resource
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_DUMPABLE = 4
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_M_PERTURB = -6
_PERTURB_BYTE = 0xFF
_CAP_IPC_LOCK = 1 << 14


def protect_memory() -> list[str]:
    """Keep the memory of this process off every disk as far as the system permits.

    No core is dumped and no bytecode written, memory is locked against swapping, and the C library overwrites
    what is freed.

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

    Under a limit, allocations would fail as soon as it is reached, so memory is not locked then.
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
