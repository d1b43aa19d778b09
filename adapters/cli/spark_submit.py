"""`spark-submit projections/rebuild.py`: a rebuild started by Spark."""

import argparse
import logging
import os
import sys

import msgspec

from postroom.domain.errors import PostroomError
from postroom.domain.search import BodyRules


def main() -> int:
    """Run a rebuild, and return the exit code."""
    arguments = _parse()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)  # stdout is for the report
    try:
        from postroom.adapters.compose.projections import rebuild_projections

        report = rebuild_projections(
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
        sys.stderr.write(f"postroom: {error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(report).decode() if arguments.json else report.summary()}\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = store_parser("Rebuild the read models of a Postroom store.")
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
    return parse(parser)


def store_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all entry points have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--store",
        default=os.environ.get("POSTROOM_STORE"),
        help="path of a SQLite store, or postgresql:// URL",
    )
    parser.add_argument("--archive", help="also read the log segments that retention archived in this folder")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments of the command line; end the process when no store is named."""
    arguments = parser.parse_args()
    if not arguments.store:
        parser.error("name the store with --store or POSTROOM_STORE")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
