"""Wiring of anchors: ends of a store's logs in a separate file."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.adapters.anchors.file import AnchorFile, check_repository, commit
from postroom.adapters.compose import list_mailboxes
from postroom.adapters.compose.store import open_store
from postroom.application.anchors import Anchor, check_logs, next_anchor
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG

RESERVED_LOGS = (AUDIT_LOG, CAPABILITY_LOG)


class Anchoring(NamedTuple):
    """Result of `anchor_store`: the new anchors, and the number of unchanged logs."""

    added: list[Anchor]
    unchanged: int


def anchor_store(
    store: str, file: Path, *, mailbox: str | None = None, git: bool = False, timestamp_url: str | None = None
) -> Anchoring:
    """Append the ends of a store's logs to an anchor file, except those of unchanged logs.

    Arguments:
        mailbox: the mailbox whose log is anchored; None for all logs, including the audit log and the log of
            capabilities.
        git: commit the file to the git repository that contains it.
        timestamp_url: an RFC 3161 authority that certifies when each anchor existed.

    Raises: BrokenLog if a log was truncated or rewritten since its last anchor; InvalidRequest if the file is
        not an anchor file; Unavailable if a step fails. The file is then unchanged, unless the commit to git
        failed.
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
        mailbox: the mailbox whose anchors are returned; None for all.

    Raises: the errors of `AnchorFile.read`; InvalidRequest without anchors; BrokenLog if a log is missing.
    """
    anchors = [each for each in AnchorFile(file).read() if mailbox in (None, each.log)]
    if not anchors:
        raise InvalidRequest(
            f"The file {file} has no anchor of {mailbox}, so its log can't be compared; anchor it first, or "
            "name another file."
        )
    check_logs(anchors, _logs(store), store)
    return anchors


@explain_missing_extra("anchors")
def verify_timestamps(anchors: Iterable[Anchor], certificates: Path) -> list[datetime]:
    """Return the certified times of the anchors with time stamps.

    Arguments:
        certificates: PEM file with the root certificates of the authorities.

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
    """Return the names of a store's logs: its mailboxes, and the reserved logs that exist."""
    names = list(list_mailboxes(store))
    for name in RESERVED_LOGS:
        try:
            open_store(store).existing_log(name).close()
        except NotFound:
            continue
        names.append(name)
    return names
