"""Wiring of encryption and erasure: the key store, the master key, and what uses them."""

import os
from pathlib import Path

from postroom.adapters.postgres.url import is_url
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.erasure.protection import Protection
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.subject_keys import MasterKey, SubjectKeys


def open_protection(settings: ErasureSettings) -> Protection:
    """Return the protection of a mailbox's messages, after a test of the key store.

    Raises: InvalidRequest for wrong settings or another master key, NotFound when the key store or the master
        key does not exist, Unavailable when they can't be used, MissingExtra without `cryptography`.
    """
    valid = settings.validate()
    keys = open_subject_keys(valid, open_master_key(valid))
    keys.get(())
    return Protection(keys, valid.topics)


def open_subject_keys(settings: ErasureSettings, master_key: MasterKey) -> SubjectKeys:
    """Return the key store; its methods raise as those of `SubjectKeys`.

    Raises: MissingExtra for one in PostgreSQL without the driver.
    """
    if is_url(settings.keys):
        with explain_missing_extra("postgres"):
            from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys

        return PostgresSubjectKeys(settings.keys, master_key, SystemClock().wall)
    from postroom.adapters.subject_keys.sqlite import SqliteSubjectKeys

    return SqliteSubjectKeys(Path(settings.keys), master_key, SystemClock().wall)


def open_master_key(settings: ErasureSettings) -> MasterKey:
    """Return the master key; raises as `open_protection`."""
    with explain_missing_extra("erasure"):
        from postroom.adapters.subject_keys.master_key import (
            master_key_of,
            read_master_key,
            run_master_key_command,
        )

    if settings.master_key_file is not None:
        return read_master_key(Path(settings.master_key_file))
    if settings.master_key_command is not None:
        return run_master_key_command(settings.master_key_command)
    return master_key_of(os.environ, settings.master_key_variable or "")


def create_key_store(settings: ErasureSettings) -> MasterKey:
    """Create the key store, and the file of the master key unless it exists; return the master key.

    Raises: InvalidRequest when the key store exists, Unavailable when its database is not migrated; otherwise
        as `open_protection`.
    """
    with explain_missing_extra("erasure"):
        from postroom.adapters.subject_keys.master_key import create_master_key

    valid = settings.validate()
    file = valid.master_key_file
    if file is not None and not os.path.exists(file):
        master_key: MasterKey = create_master_key(Path(file))
    else:
        master_key = open_master_key(valid)
    if is_url(valid.keys):
        with explain_missing_extra("postgres"):
            from postroom.adapters.subject_keys import postgres

        postgres.create_subject_keys(valid.keys, master_key)
    else:
        from postroom.adapters.subject_keys import sqlite

        sqlite.create_subject_keys(Path(valid.keys), master_key)
    return master_key
