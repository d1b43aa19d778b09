"""`EraseSubject`: destroy the key of a data subject, and record that."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from postroom.application.erasure.records import (
    GENESIS,
    ErasureRecord,
    LogEnd,
    SubjectMessages,
    hash_of,
    read_records,
)
from postroom.application.ports.subject_keys import ErasureLog, MasterKey, Subject, SubjectKeys
from postroom.domain.arguments import check_any_text
from postroom.domain.errors import IntegrityFailure, NotFound


class StoreOfSubject(NamedTuple):
    """What an erasure needs of a store.

    Arguments:
        name: of the store, for the record.
        remove_messages: removes what the mailboxes would still deliver of a pseudonym, and counts it.
        find_messages: returns the messages of a pseudonym.
        read_ends: returns the ends of the logs.
    """

    name: str
    remove_messages: Callable[[str], Awaitable[int]]
    find_messages: Callable[[str], Sequence[SubjectMessages]]
    read_ends: Callable[[], Sequence[LogEnd]]


class EraseSubject:
    """Handler that erases subjects.

    A subject is erased from the moment its key is destroyed, which is the first step. The others may be
    repeated after a crash, until the record is written: removing what would still be delivered, writing the
    record, and forgetting which pseudonym the name had.
    """

    def __init__(
        self, keys: SubjectKeys, master_key: MasterKey, log: ErasureLog, now: Callable[[], int]
    ) -> None:
        """Take the key store, the master key, the erasure log, and the wall clock in µs since 1970 UTC."""
        self._keys = keys
        self._master_key = master_key
        self._log = log
        self._now = now

    def find(self, subject: str) -> Subject:
        """Return a subject that can be erased, or whose erasure was interrupted.

        Raises: NotFound if there is no subject of this name.
        """
        subject_of_name = self._keys.find(check_any_text("subject", subject))
        if subject_of_name is None:
            raise NotFound(
                "The key store has no subject of this name: no message was encrypted for it, or it is "
                "erased. Check the name."
            )
        return subject_of_name

    def list_pending(self) -> list[Subject]:
        """Return the subjects whose erasure was interrupted, or undone by restoring the key store.

        Raises: IntegrityFailure when the erasure log was altered.
        """
        recorded = {each.pseudonym for each in self.read_records()}
        return [
            each
            for each in self._keys.list_subjects()
            if (each.erased_at is not None and not each.is_recorded)
            or (each.erased_at is None and each.pseudonym in recorded)
        ]

    async def __call__(self, subject: Subject, store: StoreOfSubject) -> ErasureRecord:
        """Erase a subject, or complete its erasure; return the record.

        Raises: Unavailable when a step fails; what was done remains, and the call may be repeated.
        """
        with self._log.locked():
            records = self.read_records()  # before anything is destroyed
            self._check_complete(records)
            self._keys.destroy(subject.pseudonym, self._now())
            (erased,) = (each for each in self._keys.list_subjects() if each.pseudonym == subject.pseudonym)
            removed = await store.remove_messages(subject.pseudonym)
            record = next((each for each in records if each.pseudonym == subject.pseudonym), None)
            if record is None:
                record = self._record(erased, removed, store)
                self._log.append(record.encode())
            self._keys.mark_recorded(subject.pseudonym)
        return record

    def read_records(self) -> list[ErasureRecord]:
        """Return the records, oldest first, after checking signatures and hashes.

        Raises: IntegrityFailure when one was altered or removed.
        """
        return list(read_records(self._log.read(), self._master_key))

    def verify(self) -> list[ErasureRecord]:
        """Return the records after comparing them with the key store.

        Raises: IntegrityFailure when a completed erasure has no record, or a recorded one has a key again.
        """
        records = self.read_records()
        recorded = {each.pseudonym for each in records}
        for each in self._check_complete(records):
            if each.erased_at is None and each.pseudonym in recorded:
                raise IntegrityFailure(
                    f"The key store has a key of {each.pseudonym} again, which was erased: an older copy was "
                    "restored. Run postroom erase --pending."
                )
        return records

    def _check_complete(self, records: Sequence[ErasureRecord]) -> Sequence[Subject]:
        """Return all subjects after checking that each completed erasure has a record."""
        subjects, recorded = self._keys.list_subjects(), {each.pseudonym for each in records}
        for each in subjects:
            if each.is_recorded and each.pseudonym not in recorded:
                raise IntegrityFailure(
                    f"The erasure log has no record of {each.pseudonym}, which was erased: it is another "
                    "file, or its end was cut off. Name that file as records, or restore it from a backup."
                )
        return subjects

    def _record(self, erased: Subject, removed: int, store: StoreOfSubject) -> ErasureRecord:
        lines = self._log.read()
        return ErasureRecord(
            pseudonym=erased.pseudonym,
            store=store.name,
            erased_at=erased.erased_at or 0,
            recorded_at=self._now(),
            messages=list(store.find_messages(erased.pseudonym)),
            removed=removed,
            logs=list(store.read_ends()),
            previous=hash_of(lines[-1]) if lines else GENESIS,
            public_key=self._master_key.public_key.hex(),
        ).sign(self._master_key)
