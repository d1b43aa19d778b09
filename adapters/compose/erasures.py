"""Wiring of erasures in a store: its mailboxes, the key store, and the erasure log beside that."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from postroom.adapters.compose import OwnerSettings
from postroom.adapters.compose.connect import share_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_master_key, open_store, open_subject_keys
from postroom.adapters.subject_keys.memory import FileErasureLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import (
    EraseSubject,
    ErasureRecord,
    ErasureSettings,
    LogEnd,
    StoreOfSubject,
    SubjectMessages,
)
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.mailbox.segments import ends_with
from postroom.application.ports.subject_keys import Subject
from postroom.application.queries.find_subject import CountEncrypted, FindSubject, SubjectInLog
from postroom.application.queries.mailbox_past import LogTime


class ErasurePreview(NamedTuple):
    """Messages that an erasure would make unreadable, and the number of the subject's plaintext messages."""

    subject: Subject
    messages: list[SubjectMessages]
    plaintext: int


class ErasureVerification(NamedTuple):
    """Result of `Erasures.verify`.

    Arguments:
        records: number of records, all of which are signed.
        public_key: key that verifies them, in hex.
        ends: number of log ends in the records of this store.
        ends_in_logs: how many of these ends the logs still contain; fewer after retention or a restore.
        encrypted, erased: number of encrypted messages in the logs, and of those whose key was destroyed.
    """

    records: int
    public_key: str
    ends: int
    ends_in_logs: int
    encrypted: int
    erased: int


class Erasures:
    """Erasures in a store.

    Arguments:
        mailboxes: names of the store's mailboxes.
        owner: settings for opening mailboxes that no process owns, including erasure.
        archive: folder with the records that retention removed.
    """

    def __init__(
        self,
        store: str,
        mailboxes: Sequence[str],
        settings: ErasureSettings,
        owner: OwnerSettings,
        archive: str | None = None,
    ) -> None:
        self._store = store
        self._mailboxes = mailboxes
        self._owner = owner
        self._archive = archive
        # What previews read of the logs, by pseudonym and mailbox: an erasure reads on from there.
        self._reads: dict[tuple[str, str], SubjectInLog] = {}
        valid = settings.validate()
        self._master_key = open_master_key(valid)
        self._keys = open_subject_keys(valid, self._master_key)
        log = FileErasureLog(Path(str(valid.records)))
        self._erase = EraseSubject(self._keys, self._master_key, log, SystemClock().wall)

    def preview(self, subject: str) -> ErasurePreview:
        """Return what erasing a subject would make unreadable.

        Raises: NotFound when there is no such subject, Unavailable when the store or the keys can't be read.
        """
        subject_of_name = self._erase.find(subject)
        messages, plaintext = self._find(subject_of_name.pseudonym, subject)
        return ErasurePreview(subject_of_name, messages, plaintext)

    def list_pending(self) -> list[Subject]:
        """Return the subjects whose erasure is incomplete; see `EraseSubject.list_pending`."""
        return self._erase.list_pending()

    async def erase(self, subject: Subject) -> ErasureRecord:
        """Erase a subject, or complete its erasure; see `EraseSubject`."""
        where = StoreOfSubject(
            open_store(self._store).where,
            self._remove,
            lambda pseudonym: self._find(pseudonym, None)[0],
            self._read_ends,
        )
        return await self._erase(subject, where)

    def verify(self, count: CountEncrypted | None = None) -> ErasureVerification:
        """Verify the records, and compare them with the key store and the logs.

        Arguments:
            count: count of the encrypted messages of all mailboxes; None counts them in the logs.

        Raises: IntegrityFailure, UnknownPseudonym, Unavailable.
        """
        records = self._erase.verify()
        where = open_store(self._store).where
        recorded = (end for each in records if each.store == where for end in each.logs)
        ends = [end for end in recorded if end.log in self._mailboxes]
        contained, total = 0, count or CountEncrypted()
        for name in self._mailboxes:
            with read_mailbox(self._store, name, archive=self._archive) as reader:
                mine = [end for end in ends if end.log == name]
                contained += sum(
                    ends_with(reader.log, end.position, bytes.fromhex(end.chain)) for end in mine
                )
                if count is None:
                    total.read(reader.log)
        public_key = self._master_key.public_key.hex()
        return ErasureVerification(len(records), public_key, len(ends), contained, *total.total(self._keys))

    async def _remove(self, pseudonym: str) -> int:
        removed = 0
        for name in self._mailboxes:
            async with share_mailbox(self._store, name, settings=self._owner) as mailbox:
                removed += await mailbox.erase_messages(pseudonym)
        return removed

    def _find(self, pseudonym: str, subject: str | None) -> tuple[list[SubjectMessages], int]:
        messages: list[SubjectMessages] = []
        plaintext = 0
        for name in self._mailboxes:
            with read_mailbox(self._store, name, archive=self._archive) as reader:
                protection = MessageEncryption(self._keys, reader.get_settings().subject_policies)
                find = FindSubject(reader.log, LogTime(reader.log, SystemClock()), protection)
                subject_in_log = find(pseudonym, subject, self._reads.get((pseudonym, name)))
            self._reads[pseudonym, name] = subject_in_log
            messages += subject_in_log.encrypted
            plaintext += subject_in_log.plaintext
        return messages, plaintext

    def _read_ends(self) -> list[LogEnd]:
        ends = []
        for name in self._mailboxes:
            with closing(open_store(self._store).existing_log(name)) as log:
                head = log.head()
            if head is not None:
                ends.append(LogEnd(name, head.position, head.chain.hex()))
        return ends
