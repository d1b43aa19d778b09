"""Run seeds until one breaks a promise, or repeat one and print all that happened: `make simulation`."""

import argparse

from postroom.domain.lease.lease import LeaseAcquired, LeaseExpired
from tests.simulation.cluster.cluster import Cluster, run, trace_line


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="make simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    if arguments.seeds == 1:
        _repeat(arguments.seed)
        return
    acquired = expired = 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        events = run(seed).log.events
        acquired += sum(isinstance(event, LeaseAcquired) for event in events)
        expired += sum(isinstance(event, LeaseExpired) for event in events)
    print(
        f"{arguments.seeds:,} seeds from {arguments.seed}: {acquired:,} leases were acquired, "
        f"{expired:,} expired, and every promise was kept."
    )


def _repeat(seed: int) -> None:
    cluster = Cluster(seed)
    try:
        cluster.run()
    finally:
        print("\n".join(trace_line(entry) for entry in cluster.world.trace))


main()
