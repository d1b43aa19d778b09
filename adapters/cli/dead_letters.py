"""What the commands of dead letters have in common: of a mailbox, of ingestion, an inbox and an outbox."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.application.inbox.metrics import InboxBacklog
    from postroom.application.outbox.operate import OutboxBacklog
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from typer import Option

from postroom.adapters.cli.output import Output, Time
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

DISCARDED = "discarded by an operator"
Cause = Annotated[str | None, Option("--reason", help="Only this reason, such as max_attempts.")]
Remark = Annotated[str, Option("--reason", help="Why; recorded in the history.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would be redriven.")]
Item = TypeVar("Item")


class Row(NamedTuple):
    """A dead letter in a list.

    Arguments:
        id: by which commands name it.
        origin: its topic, subject or type.
        at: when it became a dead letter.
        more: other values, which `--wide` shows.
    """

    id: object
    origin: str
    reason: str | None
    attempts: int | None = None
    error: str | None = None
    at: object = None
    more: Mapping[str, object] = {}


def show_dead_letters(
    session: Session,
    letters: Sequence[Item],
    row: Callable[[Item], Row],
    *,
    id_: str = "message",
    origin: str = "topic",
    as_json: Callable[[Item], object] = lambda item: item,
    **facts: Any,
) -> None:
    """Show dead letters as JSON, or as a table in which the reason stands for a missing error.

    Arguments:
        id_, origin: names of the columns.
        facts: other members of the JSON document.
    """
    if session.out.as_json:
        session.out.json({"dead_letters": [*map(as_json, letters)], **facts})
        return
    rows = [*map(row, letters)]
    more = tuple(rows[0].more) if rows else ()
    columns = (id_, origin, *more, "reason", "attempts", "last error", "age")
    cells = [
        (
            each.id,
            each.origin,
            *each.more.values(),
            each.reason,
            each.attempts,
            each.error if session.out.wide else each.error or each.reason,
            each.at,
        )
        for each in rows
    ]
    empty = [name for name, values in zip(columns, zip(*cells, strict=True), strict=False) if not any(values)]
    session.out.table(columns, cells, only_wide=(*more, "reason", "attempts", *empty))


def check_selection(ids: Iterable[str] | None, every: bool, what: str, command: str) -> None:
    """Raise WrongUsage unless either ids are named or all are meant.

    Arguments:
        what: the purpose, such as `dead letters to discard`.
        command: lists them.
    """
    if bool(ids) == every:
        raise WrongUsage(f"Name the {what}, or pass --all; see postroom {command}.")


def report(session: Session, verb: str, count: int, more: str = "", noun: str = "dead letter") -> None:
    """Write how many dead letters were redriven, purged or discarded.

    Arguments:
        more: continues the sentence.
    """
    session.out.result({verb: count}, f"{pluralize(count, noun)} {verb}{more}")


def show_backlog(out: Output, backlog: "InboxBacklog | OutboxBacklog") -> None:
    """Show the number of waiting rows, and the age of the oldest."""
    if out.as_json:
        out.json(backlog)
        return
    oldest = None if backlog.oldest_at is None else Time(backlog.oldest_at)
    out.table(("context", "count", "oldest"), [(backlog.context, backlog.count, oldest)])


def show_cleanup(out: Output, removed: int | None, noun: str) -> None:
    """Show the number of rows that a cleanup removed; None if another one is running."""
    text = "another cleanup is running" if removed is None else f"{pluralize(removed, noun)} removed"
    out.result({"removed": removed}, text)
