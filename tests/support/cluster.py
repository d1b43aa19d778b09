"""Parts of a cluster that are under the control of a test."""

from collections.abc import Callable
from typing import TypeVar

from postroom.application.ports.control_plane import LeaseRequest
from postroom.application.ports.route_push import RouteChange
from postroom.domain.errors import Unavailable

T = TypeVar("T")

ACQUISITION = "0192d1f0-7c1a-7000-8000-{:012x}"


async def call_at_once(work: Callable[[], T], /) -> T:
    """`Blocking` in the caller's thread."""
    return work()


class RecordedPush:
    """`RoutePush` that records what each proxy is told.

    Attributes:
        changes: by the address of the proxy.
        unreachable: addresses of proxies that can't be reached.
    """

    def __init__(self) -> None:
        self.changes: dict[str, list[RouteChange]] = {}
        self.unreachable: set[str] = set()

    async def push(self, address: str, change: RouteChange) -> None:
        if address in self.unreachable:
            raise Unavailable(f"{address} can't be reached.")
        self.changes.setdefault(address, []).append(change)

    async def forget(self, address: str) -> None:
        """Do nothing: there are no connections."""

    def mailboxes(self, address: str) -> list[str]:
        """Return the mailboxes of the changes of which a proxy was told."""
        return [each.mailbox for each in self.changes.get(address, [])]


def lease_request(
    mailbox: str = "orders@proxy-1",
    runner: str = "runner-1",
    *,
    attempt: int = 1,
    proxy: str = "proxy-1",
    address: str = "127.0.0.1:7001",
    log_epoch: int = 0,
    ttl_ms: int | None = None,
) -> LeaseRequest:
    """Return a request for a lease.

    Arguments:
        attempt: number of the acquisition; the same number repeats it.
    """
    return LeaseRequest(
        mailbox=mailbox,
        runner=runner,
        proxy=proxy,
        address=address,
        acquisition=ACQUISITION.format(attempt),
        log_epoch=log_epoch,
        ttl_ms=ttl_ms,
    )
