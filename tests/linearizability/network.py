"""Packets that are dropped between processes of this network (needs root, and `nft`)."""

import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RULES = "table inet faults {{\n chain output {{\n type filter hook output priority 0;\n {rules}\n }}\n}}\n"


def local_ports(pid: int) -> set[int]:
    """Return the local TCP ports of a process in this network."""
    return {_port(local) for local, _ in _connections(pid)}


def remote_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process is connected to."""
    return {_port(remote) for _, remote in _connections(pid)}


def _connections(pid: int) -> Iterator[tuple[str, str]]:
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(descriptor.readlink().name)
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets:
                yield fields[1], fields[2]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


@contextmanager
def dropped(*matches: str) -> Iterator[None]:
    """Drop the packets that match while the context lasts."""
    _nft(_RULES.format(rules="\n".join(f"{match} drop" for match in matches)))
    try:
        yield
    finally:
        _nft("delete table inet faults")


@contextmanager
def cut_off(pid: int, group: int, peers: Collection[int] = ()) -> Iterator[None]:
    """Drop all packets from and to a process while the context lasts, also of new connections.

    Arguments:
        group: of the sockets of that process alone.
        peers: only what it exchanges with these ports of others.
    """
    to, sender = (f"tcp dport {_set(peers)}", f"tcp sport {_set(peers)}") if peers else ("", "")
    with dropped(f"meta skgid {group} {to}", f"{sender} tcp dport {_set(local_ports(pid))}"):
        yield


def _set(ports: Collection[int]) -> str:
    return f"{{ {', '.join(map(str, sorted(ports)))} }}"


def _nft(rules: str) -> None:
    subprocess.run([shutil.which("nft") or "nft", "-f", "-"], input=rules, text=True, check=True)
