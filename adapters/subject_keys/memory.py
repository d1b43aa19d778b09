"""The subject keys port in memory, and the log of erasures."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from secrets import token_bytes, token_hex
from threading import Lock

from postroom.adapters.files import sync
from postroom.adapters.subject_keys.master_key import DATA_KEY_BYTES, PSEUDONYM_PREFIX, DataKey
from postroom.application.ports.subject_keys import MasterKey, Subject, SubjectKeys, UnknownPseudonym
from postroom.domain.errors import Unavailable


class MemorySubjectKeys(SubjectKeys):
    """Subject keys that are lost at the end of the process; see `SubjectKeys`."""

    def __init__(self, master_key: MasterKey, now: Callable[[], int]) -> None:
        self._master_key = master_key
        self._now = now
        self._subjects: dict[str, Subject] = {}
        self._indexes: dict[str, bytes] = {}
        self._keys: dict[str, bytes] = {}
        self._lock = Lock()

    def get_or_create(self, subjects: Collection[str]) -> Mapping[str, DataKey]:
        with self._lock:
            return {subject: self._get(subject) or self._add(subject) for subject in subjects}

    def get(self, subjects: Collection[str]) -> Mapping[str, DataKey]:
        with self._lock:
            keys = {subject: self._get(subject) for subject in subjects}
        return {subject: key for subject, key in keys.items() if key is not None}

    def resolve(self, pseudonyms: Collection[str]) -> Mapping[str, DataKey | None]:
        with self._lock:
            for pseudonym in pseudonyms:
                self._check(pseudonym)
            return {
                each: self._unwrap(each, self._keys[each]) if each in self._keys else None
                for each in pseudonyms
            }

    def find(self, subject: str) -> Subject | None:
        with self._lock:
            subjects = [self._subjects[each] for each in self._pseudonyms(subject)]
        return min(subjects, key=lambda each: each.erased_at is not None, default=None)

    def list_subjects(self) -> Sequence[Subject]:
        with self._lock:
            return list(self._subjects.values())

    def destroy(self, pseudonym: str, now: int) -> None:
        with self._lock:
            self._check(pseudonym)
            if self._keys.pop(pseudonym, None) is not None:
                self._subjects[pseudonym] = self._subjects[pseudonym]._replace(erased_at=now)

    def mark_recorded(self, pseudonym: str) -> None:
        with self._lock:
            self._check(pseudonym)
            if pseudonym not in self._keys:
                self._indexes.pop(pseudonym, None)
                self._subjects[pseudonym] = self._subjects[pseudonym]._replace(is_recorded=True)

    def _pseudonyms(self, subject: str) -> list[str]:
        index = self._master_key.index(subject)
        return [pseudonym for pseudonym, each in self._indexes.items() if each == index]

    def _get(self, subject: str) -> DataKey | None:
        for pseudonym in self._pseudonyms(subject):
            if pseudonym in self._keys:
                return self._unwrap(pseudonym, self._keys[pseudonym])
        return None

    def _add(self, subject: str) -> DataKey:
        pseudonym, data_key = PSEUDONYM_PREFIX + token_hex(16), token_bytes(DATA_KEY_BYTES)
        self._subjects[pseudonym] = Subject(pseudonym, self._now())
        self._indexes[pseudonym] = self._master_key.index(subject)
        self._keys[pseudonym] = self._master_key.wrap(data_key, pseudonym)
        return DataKey(pseudonym, data_key)

    def _unwrap(self, pseudonym: str, data_key: bytes) -> DataKey:
        return DataKey(pseudonym, self._master_key.unwrap(data_key, pseudonym))

    def _check(self, pseudonym: str) -> None:
        if pseudonym not in self._subjects:
            raise UnknownPseudonym(pseudonym, "The key store in memory")


MODE = 0o600


class FileErasureLog:
    """Erasure log in a file that the first lock creates; see `ErasureLog`.

    A last line that a crash left incomplete is ignored, and replaced by the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[bytes]:
        """Return the lines; see `ErasureLog.read`."""
        try:
            return self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._failure(error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file against other processes; see `ErasureLog.locked`."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        except OSError as error:
            raise self._failure(error) from error
        try:
            sync(self._path.parent)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"Another process writes {self._path}; try again when it has ended."
                ) from None
            yield
        finally:
            os.close(descriptor)

    def append(self, line: bytes) -> None:
        """Append a line; see `ErasureLog.append`."""
        try:
            with self._path.open("r+b", buffering=0) as file:
                end = file.read().rfind(b"\n") + 1
                file.truncate(end)
                file.seek(end)
                data = line + b"\n"
                if file.write(data) < len(data):
                    file.truncate(end)
                    raise Unavailable(f"The disk of {self._path} is full; free some space and try again.")
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> Unavailable:
        return Unavailable(f"The erasure log {self._path} can't be used: {error.strerror}.")
