"""Settings of encryption and erasure."""

import os
from collections.abc import Mapping

import msgspec

from postroom.domain.arguments import check_path, check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.subject_policy import SubjectPolicy, check_subject_policies

ERASURE_LOG_SUFFIX = ".erasures"
"""Suffix of the erasure log beside the file of a key store."""
_URLS = ("postgresql://", "postgres://")


class ErasureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of encryption and erasure (ADR 0089).

    Arguments:
        keys: path of the key store, or URL of its PostgreSQL database; outside the store and its backups.
            `postroom erasure init` creates it.
        records: path of the erasure log; beside the key store by default, required for one in a database.
        topics: policies by topic, of a new mailbox; `*` is that of all topics without one of their own. One
            that exists must have them; none take those that it has.
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
