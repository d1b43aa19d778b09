"""`spark-submit projections/rebuild.py`, `verify.py` or `report.py`: a command started by Spark."""

import argparse
import logging
import os
import sys
from collections.abc import Callable

import msgspec

from postroom.adapters.cli.values import REFUSED
from postroom.domain.errors import PostroomError
from postroom.domain.search import BodyRules


def main() -> int:
    """Run the job that the first argument names, and return the exit code."""
    commands: dict[str, Callable[[], int]] = {"rebuild": rebuild, "report": report, "verify": verify}
    return commands[sys.argv.pop(1)]()


def report() -> int:
    """Run a report, with the options of `postroom report`."""
    from postroom.adapters.cli.main import main

    sys.argv[1:1] = ["report"]
    main()
    return 0


def rebuild() -> int:
    """Run a rebuild."""
    parser = _store_parser("Rebuild the read models of a Postroom store.")
    parser.add_argument(
        "--only", default="", help="models to build, separated by commas; `search` is an alias of `mailbox`"
    )
    parser.add_argument("--to-position", action="append", default=[], help="N, or MAILBOX:N; may be repeated")
    parser.add_argument(
        "--compare", action="store_true", help="count the rows that differ from the active version"
    )
    parser.add_argument("--into", help="write to this target instead of the store")
    parser.add_argument(
        "--bodies",
        action="append",
        default=[],
        metavar="TOPIC",
        help="topic, or glob, whose bodies are searched for words; may be repeated",
    )
    parser.add_argument(
        "--restart", action="store_true", help="start over instead of resuming an interrupted rebuild"
    )
    parser.add_argument(
        "--verify", action="store_true", help="check the hashes of all commits and envelopes that are read"
    )
    parser.add_argument("--allow-gaps", action="store_true", help="ignore missing log records")
    arguments = _parse(parser)
    try:
        from postroom.adapters.compose.projections import rebuild_projections

        result = rebuild_projections(
            arguments.store,
            only=[name for name in arguments.only.split(",") if name],
            to_position=arguments.to_position,
            compare=arguments.compare,
            archive=arguments.archive,
            into=arguments.into,
            bodies=BodyRules(tuple(arguments.bodies)),
            restart=arguments.restart,
            verify=arguments.verify,
            allow_gaps=arguments.allow_gaps,
        )
    except PostroomError as error:
        return _refuse(error)
    sys.stdout.write(f"{msgspec.json.encode(result).decode() if arguments.json else result.summary()}\n")
    return 0


def verify() -> int:
    """Run a verification of the read models."""
    parser = _store_parser("Compare the read models of a Postroom store with its log.")
    parser.add_argument(
        "--no-chain", action="store_true", help="do not check the hashes of commits and envelopes"
    )
    arguments = _parse(parser)
    try:
        from postroom.adapters.compose.projections import verify_projections

        result = verify_projections(arguments.store, archive=arguments.archive, chain=not arguments.no_chain)
    except PostroomError as error:
        return _refuse(error)
    sys.stdout.write(f"{msgspec.json.encode(result).decode() if arguments.json else result.summary()}\n")
    return 0 if result.is_intact else REFUSED


def _store_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that rebuilds and verifications have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--store",
        default=os.environ.get("POSTROOM_STORE"),
        help="path of a SQLite store, or postgresql:// URL",
    )
    parser.add_argument("--archive", help="also read the log segments that retention archived in this folder")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    return parser


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments of the command line; end the process when no store is named."""
    arguments = parser.parse_args()
    if not arguments.store:
        parser.error("name the store with --store or POSTROOM_STORE")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)  # stdout is for the report
    return arguments


def _refuse(error: PostroomError) -> int:
    sys.stderr.write(f"postroom: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
