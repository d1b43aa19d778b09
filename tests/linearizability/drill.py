"""An hour's worth of faults in minutes, of a store in JetStream: `python -m tests.linearizability.drill`.

Three NATS servers have the logs and the leases; admins, runners and clients are processes. As root, and with
`nft`, servers, owners and clients are cut off, too. The table says what was done, how long the mailboxes took
to go on, and what was found.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from postroom.adapters.cli.output import Output
from tests.linearizability.__main__ import OWN_NETWORK, has_network_tools, in_own_network
from tests.linearizability.cluster import PROMISES, Figures, drill
from tests.linearizability.defects import DEFECTS
from tests.linearizability.faults import (
    OF_CLIENTS,
    OF_NETWORK,
    OF_NETWORK_OF_SERVERS,
    OF_RUNNERS,
    OF_SERVERS,
)
from tests.linearizability.node import LEASE

ALONE = (*OF_RUNNERS, "kill_admin", *OF_CLIENTS, *OF_SERVERS)
CUT_OFF = (*OF_NETWORK, *OF_NETWORK_OF_SERVERS)
TAKE_OVER_SECONDS = (LEASE.ttl_ms + LEASE.grace_period_ms) / 1_000 + 1
"""TTL and grace period, and a second to acquire the lease, replace the former owner and fold the log."""


def main(
    rounds: Annotated[int, Option(min=1, help="Times that each fault happens.")] = 2,
    fault: Annotated[list[str] | None, Option(help="Only these faults; default all.")] = None,
    defect: Annotated[str, Option(help=f"Put a defect into the owners: {', '.join(DEFECTS)}.")] = "",
    as_json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Let everything fail that can, and check that no promise was broken; exit with 1 if one was."""
    has_network = OWN_NETWORK in os.environ
    names = fault or [*ALONE, *(CUT_OFF if has_network else ())]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="postroom-drill-") as folder:
        figures = drill(
            "jetstream", Path(folder), faults=names * rounds, is_cut_off=has_network, defect=defect
        )
    show(Output(as_json), figures, time.monotonic() - began, has_network=has_network)
    raise typer.Exit(int(bool(figures.problems)))


def show(out: Output, figures: Figures, seconds: float, *, has_network: bool) -> None:
    """Print what was done and what was found."""
    lasting = [each for found in figures.take_overs.values() for each in found]
    in_time = sum(each <= TAKE_OVER_SECONDS for each in lasting)
    facts = {
        "seconds": round(seconds),
        "operations": figures.operations,
        "answers": figures.answers,
        "epochs": figures.epochs,
        "take_overs": len(lasting),
        "take_overs_in_time": in_time,
        "take_over_seconds": TAKE_OVER_SECONDS,
        "cut_off": has_network,
        "faults": [
            {
                "fault": name,
                "times": count,
                "take_over_seconds": _longest(figures.take_overs.get(name)),
                "pause_seconds": _longest(figures.pauses.get(name)),
            }
            for name, count in sorted(figures.faults.items())
        ],
        "problems": {name: list(figures.problems.get(name, ())) for name in PROMISES},
    }
    if out.as_json:
        out.json(facts)
        return
    rows = [
        (
            name.replace("_", " "),
            count,
            _longest(figures.take_overs.get(name)),
            _longest(figures.pauses.get(name)),
        )
        for name, count in sorted(figures.faults.items())
    ]
    out.table(["fault", "times", "take-over at most, s", "pause at most, s"], rows)
    out.note(
        f"{figures.operations:,} operations, {figures.answers:,} answered sends and acks, "
        f"{figures.epochs} epochs, in {seconds:.0f} s."
    )
    out.note(
        f"{in_time} of {len(lasting)} take-overs within {TAKE_OVER_SECONDS:g} s: TTL, grace period, and a "
        "second to open the mailbox. A stream whose leader is lost as well has another after 4 to 10 s."
    )
    if not has_network:
        out.note("Nothing was cut off: that needs root, unshare, ip and nft.")
    out.table(["found", "count"], [(name, len(figures.problems.get(name, ()))) for name in PROMISES])
    for name, found in figures.problems.items():
        out.note(f"{name}: {found[0]}")


def _longest(seconds: object) -> float | None:
    return round(max(seconds), 1) if isinstance(seconds, list) and seconds else None


if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # as in tests/conftest.py
    if has_network_tools() and OWN_NETWORK not in os.environ:
        command = in_own_network([sys.executable, "-m", "tests.linearizability.drill", *sys.argv[1:]])
        os.execvpe(command[0], command, os.environ | {OWN_NETWORK: "1"})
    typer.run(main)
