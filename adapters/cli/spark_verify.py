"""`spark-submit projections/verify.py`: a verification of the read models started by Spark."""

import logging
import sys

import msgspec

from postroom.adapters.cli.exit_codes import REFUSED
from postroom.adapters.cli.spark_submit import parse, store_parser
from postroom.domain.errors import PostroomError


def main() -> int:
    """Run a verification, and return the exit code."""
    parser = store_parser("Compare the read models of a Postroom store with its log.")
    parser.add_argument(
        "--no-chain", action="store_true", help="do not check the hashes of commits and envelopes"
    )
    arguments = parse(parser)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)  # stdout is for the report
    try:
        from postroom.adapters.compose.projections import verify_projections

        report = verify_projections(arguments.store, archive=arguments.archive, chain=not arguments.no_chain)
    except PostroomError as error:
        sys.stderr.write(f"postroom: {error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(report).decode() if arguments.json else report.summary()}\n")
    return 0 if report.is_intact else REFUSED


if __name__ == "__main__":
    sys.exit(main())
