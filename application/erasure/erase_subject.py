"""`EraseSubject`: find a data subject, destroy its key, and record that; and the settings of encryption."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from postroom.application.erasure.protection import MessageEncryption
from postroom.application.ports.subject_keys import ErasureLog, MasterKey, Subject, SubjectKeys
from postroom.domain.arguments import check_any_text, check_path, check_text
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter
from postroom.domain.subject import ATTRS, SubjectPolicy, check_subject_policies

GENESIS = "0" * 64
"""Hash before the first record."""


class LogEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of a log: the position and the chain hash, in hex, of its last commit."""

    log: str
    position: int
    chain: str


class SubjectMessages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of messages of a subject in a topic, by their status."""

    mailbox: str
    topic: str
    status: str
    messages: int


class ErasureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A completed erasure.

    Arguments:
        store: where the messages are.
        erased_at: when the key was destroyed, µs since 1970 UTC.
        recorded_at: µs since 1970 UTC.
        messages: of the subject, in the logs and archives of the store, after the erasure.
        removed: number of ready messages and dead letters that were removed.
        logs: ends of the store's logs after the removal.
        previous: BLAKE3 hash of the line before, in hex; `GENESIS` in the first.
        public_key: Ed25519 key that verifies the signature.
        signature: of the record without it.
    """

    pseudonym: str
    store: str
    erased_at: int
    recorded_at: int
    messages: list[SubjectMessages]
    removed: int
    logs: list[LogEnd]
    previous: str
    public_key: str
    signature: str = ""

    def sign(self, master_key: MasterKey) -> "ErasureRecord":
        """Return the record with a signature."""
        return msgspec.structs.replace(self, signature=master_key.sign(self._signed_bytes()).hex())

    def is_signed_by(self, master_key: MasterKey) -> bool:
        """Return whether the master key signed the record."""
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            return False
        is_own = self.public_key == master_key.public_key.hex()
        return is_own and master_key.verify(self._signed_bytes(), signature)

    def encode(self) -> bytes:
        """Return the record as JSON without line breaks."""
        return _encode(self)

    def _signed_bytes(self) -> bytes:
        return _encode(msgspec.structs.replace(self, signature=""))


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ErasureRecord).decode


def hash_of(line: bytes) -> str:
    """Return the hash with which the next record refers to a line."""
    return blake3(line).hexdigest()


def read_records(lines: Sequence[bytes], master_key: MasterKey) -> Iterator[ErasureRecord]:
    """Yield the records of an erasure log after checking their signatures and that none is missing between.

    Raises: IntegrityFailure naming the first line that was altered, removed or signed by another master key.
    """
    previous = GENESIS
    for number, line in enumerate(lines, 1):
        try:
            record = _decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            record = None
        if record is None or record.encode() != line or not record.is_signed_by(master_key):
            raise IntegrityFailure(
                f"Line {number} of the erasure log was altered, or is not signed by the master key "
                f"{master_key.key_id}; restore the file from a backup."
            )
        if record.previous != previous:
            raise IntegrityFailure(
                f"Lines before line {number} of the erasure log were removed or replaced; restore the file "
                "from a backup."
            )
        previous = hash_of(line)
        yield record


class StoreOfSubject(NamedTuple):
    """Interface of a store that an erasure needs.

    Arguments:
        name: of the store, for the record.
        remove_messages: removes the messages of a pseudonym that mailboxes would still deliver, and counts
            them.
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

        Raises: Unavailable when a step fails; completed steps remain, and the call may be repeated.
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


def as_stored(filter_: EventFilter, protection: MessageEncryption, *, with_names: bool = True) -> EventFilter:
    """Return the filter that finds stored messages for a filter on messages as they were sent.

    The name of a subject becomes its pseudonym, if a policy has subjects in that field. Among several
    principals, names remain beside pseudonyms, to match messages in the clear, too. Values of encrypted
    fields become tokens of the first subject that the filter names.

    Arguments:
        with_names: whether names remain beside pseudonyms.

    Raises: Unavailable when the key store can't be used.
    """
    policies = protection.topics.values()
    subject_fields = {each.subject for each in policies}
    values = {f"{ATTRS}{name}": value for name, value in filter_.headers.items()}
    if filter_.correlation_id is not None:
        values["correlation_id"] = filter_.correlation_id
    principals = filter_.principals if "principal" in subject_fields else ()
    names = [*principals, *(value for field, value in values.items() if field in subject_fields)]
    keys = protection.keys.get(names)
    key = next((keys[name] for name in names if name in keys), None)
    if key is None:
        return filter_
    encrypted = {field for each in policies for field in each.encrypt}
    pseudonyms = tuple(keys[name].pseudonym for name in principals if name in keys)
    remaining = tuple(
        name for name in filter_.principals if with_names or name not in principals or name not in keys
    )
    stored = {
        field: keys[value].pseudonym
        if field in subject_fields and value in keys
        else key.token(field, value.encode())
        if field in encrypted
        else value
        for field, value in values.items()
    }
    return msgspec.structs.replace(
        filter_,
        principals=remaining + pseudonyms,
        correlation_id=stored.get("correlation_id"),
        headers={name: stored[f"{ATTRS}{name}"] for name in filter_.headers},
    )


def spec_as_stored(spec: RedriveSpec, protection: MessageEncryption) -> RedriveSpec:
    """Return the specification of a redrive job with the criteria of `as_stored`.

    The log records it, so the names of subjects that have a key are left out.

    Raises: Unavailable when the key store can't be used.
    """
    filter_ = as_stored(spec.filter(), protection, with_names=False)
    return msgspec.structs.replace(
        spec,
        principals=filter_.principals,
        correlation_id=filter_.correlation_id,
        headers=dict(filter_.headers),
    )


ERASURE_LOG_SUFFIX = ".erasures"
"""Suffix of the erasure log beside the file of a key store."""
_URLS = ("postgresql://", "postgres://")


class ErasureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of encryption and erasure (ADR 0089).

    Arguments:
        keys: path of the key store, or URL of its PostgreSQL database; outside the store and its backups.
            `postroom erasure init` creates it.
        records: path of the erasure log; beside the key store by default, required for one in a database.
        topics: policies by topic, of a new mailbox; `*` applies to topics without a policy of their own. An
            existing mailbox must have the same; without any, it keeps its own.
        master_key_file: path of the file with the master key.
        master_key_variable: environment variable with the master key, instead of a file.
        master_key_command: program and arguments that print the master key, instead of a file; run without a
            shell.
    """

    keys: str
    records: str | None = None
    topics: Mapping[str, SubjectPolicy] = {}
    master_key_file: str | None = None
    master_key_variable: str | None = None
    master_key_command: str | None = None

    def validate(self) -> "ErasureSettings":
        """Return the settings with absolute paths, or raise InvalidRequest."""
        keys, records = check_path("keys", self.keys), self.records
        file, variable, command = self.master_key_file, self.master_key_variable, self.master_key_command
        if [file, variable, command].count(None) != 2:
            raise InvalidRequest(
                "The settings of erasure must name one master key, with master_key_file, master_key_variable "
                "or master_key_command."
            )
        if "://" not in keys:
            keys = os.path.abspath(keys)
            records = keys + ERASURE_LOG_SUFFIX if records is None else records
        elif not keys.startswith(_URLS):
            raise InvalidRequest("keys must be a path, or the URL of a PostgreSQL database: postgresql://...")
        elif records is None:
            raise InvalidRequest(
                "Settings of erasure with a key store in a database must name the file of the erasure log, "
                "with records."
            )
        return ErasureSettings(
            keys=keys,
            records=os.path.abspath(check_path("records", records)),
            topics=check_subject_policies(self.topics) if self.topics != {} else {},
            master_key_file=None if file is None else os.path.abspath(check_path("master_key_file", file)),
            master_key_variable=None if variable is None else check_text("master_key_variable", variable, 1),
            master_key_command=None if command is None else check_text("master_key_command", command, 1),
        )
