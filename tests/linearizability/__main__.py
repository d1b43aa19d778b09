"""Long runs against each lease store: `python -m tests.linearizability ROUNDS [STORE...]`.

As root, and with `nft`, it starts itself again in a network of its own, where it cuts off runners and admins.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.linearizability.cluster import STORES, run

FAULTS = 8
"""Of a round."""
OWN_NETWORK = "POSTROOM_TEST_OWN_NETWORK"


def has_network_tools() -> bool:
    """Return whether this process may have a network of its own, and drop packets there."""
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "nft")))


def in_own_network(command: list[str]) -> list[str]:
    """Return a command that runs in a network of its own."""
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', *command]


def main(rounds: int, stores: list[str]) -> None:
    has_network = OWN_NETWORK in os.environ
    for number in range(rounds):
        for store in stores:
            with tempfile.TemporaryDirectory(prefix="postroom-") as folder:
                began = time.monotonic()
                figures = run(store, Path(folder), faults=FAULTS, is_cut_off=has_network, seed=number)
                seconds = time.monotonic() - began
                print(f"round {number + 1}, {store}, {seconds:.0f} s: {figures}", flush=True)


if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # as in tests/conftest.py
    if has_network_tools() and OWN_NETWORK not in os.environ:
        command = in_own_network([sys.executable, "-m", "tests.linearizability", *sys.argv[1:]])
        os.execvpe(command[0], command, os.environ | {OWN_NETWORK: "1"})
    main(int(sys.argv[1]), sys.argv[2:] or list(STORES))
