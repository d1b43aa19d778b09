"""Wiring of anchors: ends of a store's logs, kept in a file apart from it."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.adapters.anchors.file import AnchorFile
from postroom.adapters.anchors.git import check_repository, commit
from postroom.adapters.compose import list_mailboxes
from postroom.adapters.compose.store import open_store
from postroom.application.anchors import Anchor, check_logs, next_anchor
from postroom.application.extras import explain_missing_extra
from postroom.application.pluralize import pluralize
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG

RESERVED_LOGS = (AUDIT_LOG, CAPABILITY_LOG)


class Anchoring(NamedTuple):
    """Result of `anchor_store`: the new anchors, and how many logs had not changed."""

    added: list[Anchor]
    unchanged: int


def anchor_store(
    store: str, file: Path, *, mailbox: str | None = None, git: bool = False, timestamp_url: str | None = None
) -> Anchoring:
    """Append the ends of a store's logs to an anchor file.

    Logs that have not changed since their last anchor get none.

    Arguments:
        mailbox: only this one's log; None is all logs, those of audit and capabilities too.
        git: commit the file to the git repository that contains it.
        timestamp_url: an RFC 3161 authority that certifies when each anchor existed.

    Raises: BrokenLog when a log was cut or rewritten since its last anchor; InvalidRequest for a file that
        is none of anchors; Unavailable when a part of it fails. The file is unchanged then, except when the
        commit to git fails.
    """
    if timestamp_url is not None and not timestamp_url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{timestamp_url!r} is not the URL of a time stamp authority; give http(s)://..."
        )
    if git:
        check_repository(file)
    names = _logs(store) if mailbox is None else [mailbox]
    with AnchorFile(file).locked() as anchors:
        if mailbox is None:
            check_logs(anchors.anchors, names, store)
        place = open_store(store)
        added = []
        for name in names:
            with closing(place.existing_log(name)) as log:
                anchor = next_anchor(log, anchors.anchors, time.time_ns() // 1_000)
            if anchor is not None:
                added.append(anchor)
        if timestamp_url is not None:
            added = asyncio.run(_timestamp(timestamp_url, added))
        anchors.append(added)
    if git:
        commit(file, f"Anchor {pluralize(len(added), 'log')}" if added else "Add anchors")
    return Anchoring(added, len(names) - len(added))


def read_anchors(file: Path, store: str, mailbox: str | None = None) -> list[Anchor]:
    """Return the anchors of a file, oldest first, after checking that the store has the logs.

    Arguments:
        mailbox: only those of this mailbox; None is all.

    Raises: NotFound, InvalidRequest or Unavailable as `AnchorFile.read`; BrokenLog when a log is missing.
    """
    anchors = [each for each in AnchorFile(file).read() if mailbox in (None, each.log)]
    check_logs(anchors, _logs(store), store)
    return anchors


@explain_missing_extra("anchors")
def verify_timestamps(anchors: Iterable[Anchor], certificates: Path) -> list[datetime]:
    """Return the certified times of those anchors that have one.

    Arguments:
        certificates: file in PEM of the authorities' root certificates.

    Raises: IntegrityFailure for a time stamp that is not valid, InvalidRequest for an unusable file.
    """
    from postroom.adapters.anchors.timestamp import load_certificates, verify_timestamp

    roots = load_certificates(certificates)
    times = [verify_timestamp(each, roots) for each in anchors]
    return [each for each in times if each is not None]


async def _timestamp(url: str, anchors: Sequence[Anchor]) -> list[Anchor]:
    with explain_missing_extra("anchors"):
        from postroom.adapters.anchors.timestamp import request_timestamp
    return [msgspec.structs.replace(each, timestamp=await request_timestamp(url, each)) for each in anchors]


def _logs(store: str) -> list[str]:
    """Return the logs of a store: of its mailboxes, and the reserved ones that exist."""
    names = list(list_mailboxes(store))
    for name in RESERVED_LOGS:
        try:
            open_store(store).existing_log(name).close()
        except NotFound:
            continue
        names.append(name)
    return names
