"""`postroom project rebuild`, `status`, `verify` and `roll-back`: versions of the read models."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Option

from postroom.adapters.cli.exit_codes import REFUSED
from postroom.adapters.cli.filters import From
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import WrongUsage
from postroom.application.extras import explain_missing_extra
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.ports.read_models import ProjectionStatus
    from postroom.domain.search import BodyRules
    from postroom.projections.ports.runner import Runner

MAX_PARKED_LIMIT = 10_000
"""Maximum number of parked records that `--parked` lists."""
DEFAULT_PARKED_LIMIT = 5
ENGINES = ("spark", "local")

Archive = Annotated[
    str | None,
    Option("--archive", metavar="FOLDER", help="Also read the log segments that retention archived here."),
]

Engine = Annotated[
    str,
    Option(
        metavar="spark|local",
        help="spark: tasks on all cores, or on a cluster; local: in this process, without a JVM.",
    ),
]


class SearchSettings(msgspec.Struct, frozen=True):
    """Settings of `[search]`.

    Arguments:
        bodies: topics, or globs such as `github.*`, whose bodies are searched for words.
    """

    bodies: tuple[str, ...] = ()


def rebuild(
    session: Session,
    only: Annotated[
        str,
        Option(metavar="MODEL,...", help="Rebuild only these models; `search` is an alias of `mailbox`."),
    ] = "",
    to_position: Annotated[
        list[str] | None,
        Option(metavar="[MAILBOX:]N", help="Stop at this log position; may be repeated, once per mailbox."),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Count the rows that differ from the active version.")
    ] = False,
    into: Annotated[
        str | None,
        Option(metavar="TARGET", help="Write to parquet:, clickhouse: or chdb: instead of the store."),
    ] = None,
    archive: Archive = None,
    restart: Annotated[
        bool, Option("--restart", help="Start over instead of resuming an interrupted rebuild.")
    ] = False,
    engine: Engine = "spark",
    verify: Annotated[
        bool, Option("--verify", help="Check the hashes of all commits and envelopes that are read.")
    ] = False,
    allow_gaps: Annotated[
        bool, Option("--allow-gaps", help="Go on when records are missing from a log.")
    ] = False,
) -> None:
    """Rebuild the read models from the logs with Spark, and switch to the new version when it is complete."""
    runner = _runner(engine)
    with explain_missing_extra("spark"):
        from postroom.adapters.compose.projections import rebuild_projections

    with session.out.progress("Starting Spark" if runner is None else "Starting") as advance:
        report = rebuild_projections(
            session.existing_store(),
            lambda at: advance(at.done / at.total if at.total else 0, at.summary()),
            only=[name.strip() for name in only.split(",") if name.strip()],
            to_position=to_position or (),
            compare=compare,
            archive=archive,
            into=into,
            bodies=body_rules(session),
            restart=restart,
            verify=verify,
            allow_gaps=allow_gaps,
            runner=runner,
        )
    session.out.result(report, *report.summary().splitlines())


def status(
    session: Session,
    parked: Annotated[
        bool, Option("--parked", help="List all parked log records instead of the first 5.")
    ] = False,
    source: From = None,
) -> None:
    """Show the active version of the read models, its lag, and the parked log records."""
    from postroom.adapters.compose.queries import read_projections

    with read_projections(session.existing_store(), source) as projections:
        current = projections.get_projection_status(MAX_PARKED_LIMIT if parked else DEFAULT_PARKED_LIMIT)
    if session.out.as_json:
        session.out.json(current)
    else:
        _show_status(session, current)


def verify(
    session: Session,
    archive: Archive = None,
    engine: Engine = "spark",
    chain: Annotated[
        bool, Option("--chain/--no-chain", help="Also check the hashes of all commits and envelopes.")
    ] = True,
) -> int | None:
    """Recompute the read models from the logs with Spark, and compare them with the active version."""
    runner = _runner(engine)
    with explain_missing_extra("spark"):
        from postroom.adapters.compose.projections import verify_projections

    with session.out.progress("Starting Spark" if runner is None else "Starting") as advance:
        report = verify_projections(
            session.existing_store(),
            lambda at: advance(at.done / at.total if at.total else 0, at.summary()),
            archive=archive,
            chain=chain,
            runner=runner,
        )
    session.out.result(report, *report.summary().splitlines())
    return None if report.is_intact else REFUSED


def roll_back(
    session: Session,
    to: Annotated[
        int | None, Option(metavar="VERSION", help="Version to make active; default: the previous one.")
    ] = None,
) -> None:
    """Make an earlier version of the read models active again, at once."""
    from postroom.adapters.compose.projections import roll_back_projections

    version = roll_back_projections(session.existing_store(), to)
    session.out.result({"version": version}, f"Version {version} is active again")


def body_rules(session: Session) -> "BodyRules":
    """Return which topics' bodies are searched, by the settings.

    Raises: InvalidSettings for an empty topic.
    """
    from postroom.domain.search import BodyRules

    topics = session.settings.section("search", SearchSettings).bodies
    if "" in topics:
        raise InvalidSettings(f"[search] in {session.settings.file}: bodies contains an empty topic.")
    return BodyRules(topics)


def _runner(engine: str) -> "Runner | None":
    """Return the runner of an engine; None for the default, Spark."""
    if engine not in ENGINES:
        raise WrongUsage(f"Unknown --engine {engine!r}; expected {' or '.join(ENGINES)}.")
    if engine == "spark":
        return None
    with explain_missing_extra("spark"):
        from postroom.adapters.compose.projections import LocalRunner

    return LocalRunner()


def _show_status(session: Session, current: "ProjectionStatus") -> None:
    from postroom.adapters.cli.tables import Time

    out = session.out
    out.table(
        ("mailbox", "position", "log end", "lag", "seconds"),
        [
            (lag.mailbox, lag.position, lag.head, lag.lag, f"{lag.seconds:.1f}" if lag.lag else None)
            for lag in current.lags
        ],
    )
    for lag in current.lags:
        if not lag.is_same_log:
            out.line(
                f"{lag.mailbox}: the log was replaced or cut since; rebuild with postroom project rebuild"
            )
    if current.active is not None:
        out.line("followed: " + ("yes" if current.is_following else "no"))
    if current.parked:
        out.line(f"parked: {pluralize(current.parked, 'log record')} that could not be projected")
        out.table(
            ("mailbox", "position", "event", "error"),
            [(each.mailbox, each.position, each.type, each.error) for each in current.parked_records],
        )
    out.table(
        ("version", "status", "age", "messages", "seconds", "error"),
        [
            (
                each.version,
                each.status,
                None if each.finished_at is None else Time(each.finished_at),
                each.counts.get("mailbox"),
                round(sum(each.seconds.values()), 1),
                each.error,
            )
            for each in current.versions
        ],
    )
    if current.active is None:
        out.note("There is no version yet; run postroom project rebuild.")
