"""The ownership port over lock files next to a SQLite store; the kernel releases them with the process."""

import asyncio
import fcntl
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from postroom.adapters.sqlite.store_file import check_own_file, check_writer
from postroom.application.ports.lease_store import Ownership
from postroom.application.threads import set_close_on_fork
from postroom.domain.errors import MailboxOwned, Unavailable, UnusableStore

POLL_SECONDS = 0.02


class FileOwnership(Ownership):
    """Ownership of a mailbox by a lock on the file `<store>-owner-<mailbox>`, which names the owner.

    Its second line is unique to each ownership. Eviction removes the file, with the lock of the process that
    hangs; the next owner creates another.
    """

    directory = None

    def __init__(self, store: str | Path) -> None:
        self._store = Path(os.path.realpath(store))  # a store has one lock, also by a symbolic link

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        path = self._path(mailbox)
        check_writer(self._store)
        now = asyncio.get_running_loop().time
        deadline = now() + wait_ms / 1_000
        while (descriptor := self._lock(path)) is None:
            if now() >= deadline:
                raise MailboxOwned(mailbox, _read(path).partition("\n")[0])
            await asyncio.sleep(POLL_SECONDS)
        set_close_on_fork(descriptor, True)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{' '.join(owner.split())}\n{uuid.uuid4().hex}".encode(), 0)
            yield
        finally:
            set_close_on_fork(descriptor, False)
            os.close(descriptor)

    async def owner(self, mailbox: str) -> str | None:
        path = self._path(mailbox)
        return _read(path).partition("\n")[0] if _is_locked(path) else None

    async def incumbent(self, mailbox: str) -> str | None:
        return _read(self._path(mailbox)) or None

    async def evict(self, mailbox: str, incumbent: str) -> None:
        path = self._path(mailbox)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # lets one process evict at a time
            if _read(path) == incumbent:
                path.unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(folder)

    def _lock(self, path: Path) -> int | None:
        try:
            return _lock(path)
        except PermissionError as error:
            raise UnusableStore(
                f"User {os.geteuid()} may not open the file {path}; run as the user of the store, or name "
                "another store."
            ) from error
        except OSError as error:
            raise Unavailable(
                f"The store {self._store} can't be opened: {error}. Check the path and its permissions."
            ) from error

    def _path(self, mailbox: str) -> Path:
        return self._store.with_name(f"{self._store.name}-owner-{quote(mailbox, safe='@$')}")


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:1_000].decode("utf-8", "replace")
    except (FileNotFoundError, PermissionError):
        return ""


def _is_locked(path: Path) -> bool:
    """Return whether a process has the lock, by trying a shared lock, which is released at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(path: Path) -> int | None:
    """Return the descriptor of the locked file; None while another process has the lock."""
    # Don't follow a symbolic link, which another user may have made: the file is truncated.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        check_own_file(path, os.fstat(descriptor))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # locked, or removed in the meantime
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
