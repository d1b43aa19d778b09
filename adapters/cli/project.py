"""`postroom project rebuild`, `verify` and `roll-back`: versions of the read models that Spark builds."""

from typing import Annotated

from typer import Option

from postroom.adapters.cli.failures import REFUSED
from postroom.adapters.cli.search import body_rules
from postroom.adapters.cli.session import Session


def rebuild(
    session: Session,
    only: Annotated[
        str, Option(metavar="MODEL,...", help="Build these and keep the others; `search` is the messages.")
    ] = "",
    to_position: Annotated[
        list[str] | None,
        Option(metavar="[MAILBOX:]N", help="Read no further; may be repeated for several mailboxes."),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Tell how the rows differ from those that are served.")
    ] = False,
    into: Annotated[
        str | None, Option(metavar="TARGET", help="Build them elsewhere: parquet:, delta: or clickhouse:.")
    ] = None,
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Read what retention archived there, too."),
    ] = None,
    restart: Annotated[
        bool, Option("--restart", help="Begin anew instead of going on with a rebuild that was killed.")
    ] = False,
) -> None:
    """Rebuild the read models from the logs with Spark, and switch to them when they are complete."""
    from postroom.adapters.compose import rebuild_projections

    with session.out.progress("Starting Spark") as move:
        report = rebuild_projections(
            session.existing_store(),
            lambda at: move(at.done / at.total if at.total else 0, at.told()),
            only=[name.strip() for name in only.split(",") if name.strip()],
            to_position=to_position or (),
            compare=compare,
            archive=archive,
            into=into,
            bodies=body_rules(session),
            restart=restart,
        )
    if session.out.as_json:
        session.out.json(report)
    else:
        session.out.line(report.told())


def roll_back(
    session: Session,
    to: Annotated[int | None, Option(metavar="VERSION", help="Which; the one before by default.")] = None,
) -> None:
    """Serve an earlier version of the read models again, at once."""
    from postroom.adapters.compose import roll_back_projections

    version = roll_back_projections(session.existing_store(), to)
    if session.out.as_json:
        session.out.json({"version": version})
    else:
        session.out.line(f"Version {version} is served again")


def verify(
    session: Session,
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Read what retention archived there, too."),
    ] = None,
) -> int | None:
    """Recompute the read models from the logs with Spark, and compare them with those that are served."""
    from postroom.adapters.compose import verify_projections

    with session.out.progress("Starting Spark") as move:
        report = verify_projections(
            session.existing_store(),
            lambda at: move(at.done / at.total if at.total else 0, at.told()),
            archive=archive,
        )
    if session.out.as_json:
        session.out.json(report)
    else:
        session.out.line(report.told())
    return None if report.is_intact else REFUSED
