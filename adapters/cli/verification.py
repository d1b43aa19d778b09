"""Results of verifying logs, shared by `postroom verify` and `postroom audit verify`."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.queries.verify import Verification

Expect = Annotated[
    str | None,
    Option(
        metavar="POSITION:CHAIN",
        help="Result of an earlier run: detects a log that was truncated or rewritten since.",
    ),
]
_CHAIN = re.compile("[0-9a-f]{64}")


def parse_expectation(text: str | None) -> tuple[int | None, str | None]:
    """Return the position and the chain hash of `--expect`; raise WrongUsage for anything else."""
    if text is None:
        return None, None
    position, _, chain = text.partition(":")
    if not position.isdecimal() or not _CHAIN.fullmatch(chain):
        raise WrongUsage(f"--expect {text!r} is not POSITION:CHAIN, as postroom verify prints it.")
    return int(position), chain


def show_verifications(session: Session, verifications: "Iterable[Verification]") -> None:
    """Write for people which records of each log are intact, and how to detect later changes."""
    for each in verifications:
        messages = f", {pluralize(each.messages, 'message')}" if "@" in each.mailbox else ""
        session.out.line(f"{each.mailbox}: intact, records {each.first:,} to {each.last:,}{messages}")
        session.out.line(f"  detect later changes with: --expect {each.last}:{each.chain}")
