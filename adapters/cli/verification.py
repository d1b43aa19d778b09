"""Results of verifying logs, shared by `postroom verify` and `postroom audit verify`."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, parse_position
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from datetime import datetime

    from postroom.adapters.compose.erasures import ErasureVerification
    from postroom.application.anchors import Anchor
    from postroom.application.queries.find_subject import CountEncrypted
    from postroom.application.queries.verify import Verification

Expect = Annotated[
    str | None,
    Option(
        metavar="POSITION:CHAIN",
        help="Result of an earlier run: detects a log that was truncated or rewritten since.",
    ),
]
Anchors = Annotated[
    str | None,
    Option(
        "--anchor",
        metavar="FILE",
        help="Anchors that postroom anchor wrote: detects a log that was truncated or rewritten since any.",
    ),
]
TimestampCa = Annotated[
    str | None,
    Option(metavar="FILE", help="Root certificates in PEM, to verify the time stamps of the anchors."),
]
_CHAIN = re.compile("[0-9a-f]{64}")


class LoadedAnchors(NamedTuple):
    """Anchors of a file, and the certified times of those that have one; `times` is None if unverified."""

    file: str | None
    anchors: Sequence["Anchor"]
    times: Sequence["datetime"] | None


def load_anchors(session: Session, file: str | None, timestamp_ca: str | None) -> LoadedAnchors:
    """Return the anchors of `--anchor`, whose time stamps are verified if `--timestamp-ca` is given."""
    if file is None:
        if timestamp_ca is not None:
            raise WrongUsage("--timestamp-ca verifies the time stamps of anchors; name them with --anchor.")
        return LoadedAnchors(None, (), None)
    from postroom.adapters.compose.anchors import read_anchors, verify_timestamps

    anchors = read_anchors(Path(file), session.existing_store(), session.settings.mailbox)
    times = None if timestamp_ca is None else verify_timestamps(anchors, Path(timestamp_ca))
    return LoadedAnchors(file, anchors, times)


def show_anchors(session: Session, anchors: LoadedAnchors, verifications: Sequence["Verification"]) -> None:
    """Write for people how many anchors the logs were compared with."""
    if anchors.file is None:
        return
    older = sum(each.older_anchors for each in verifications)
    held = sum(each.anchors for each in verifications)
    text = f"{anchors.file}: {pluralize(held, 'anchor')} compared with the logs"
    if older:
        text += f", {older:,} older than what retention left"
    if anchors.times is not None:
        text += f", {pluralize(len(anchors.times), 'time stamp')} verified"
    session.out.line(text)


def verify_erasures(session: Session, count: "CountEncrypted") -> "ErasureVerification | None":
    """Return the result of verifying the records of erasures, or None without settings of erasure.

    Arguments:
        count: of the messages of the mailboxes.
    """
    if session.erasure_settings() is None:
        return None
    from postroom.adapters.cli.erase import open_erasures

    return open_erasures(session).verify(count)


def show_erasures(session: Session, erasures: "ErasureVerification | None") -> None:
    """Write for people which messages are erased, and whether that is recorded."""
    if erasures is None:
        return
    session.out.line(
        f"{pluralize(erasures.encrypted, 'message')} encrypted, {erasures.erased:,} of them erased; "
        f"{pluralize(erasures.records, 'record')} of erasures signed by {erasures.public_key}"
    )
    if erasures.ends:
        session.out.line(
            f"  {erasures.ends_in_logs} of {erasures.ends} log ends of the records are in the logs"
        )


def parse_expectation(text: str | None) -> tuple[int | None, str | None]:
    """Return the position and the chain hash of `--expect`; raise WrongUsage for anything else."""
    if text is None:
        return None, None
    digits, _, chain = text.partition(":")
    position = parse_position(digits)
    if position is None or not _CHAIN.fullmatch(chain):
        raise WrongUsage(f"--expect {text!r} is not POSITION:CHAIN, as postroom verify prints it.")
    return position, chain


def show_verifications(session: Session, verifications: "Iterable[Verification]") -> None:
    """Write for people which records of each log are intact, and how to detect later changes."""
    for each in verifications:
        messages = f", {pluralize(each.messages, 'message')}" if "@" in each.mailbox else ""
        session.out.line(f"{each.mailbox}: intact, records {each.first:,} to {each.last:,}{messages}")
        session.out.line(f"  detect later changes with: --expect {each.last}:{each.chain}")
