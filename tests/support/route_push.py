"""What an admin pushes to proxies, recorded, and its blocking work done at once."""

from collections.abc import Callable
from typing import TypeVar

from postroom.application.ports.control_plane import RouteChange
from postroom.domain.errors import Unavailable

T = TypeVar("T")


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

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        if address in self.unreachable:
            raise Unavailable(f"{address} can't be reached.")
        self.changes.setdefault(address, []).append(change)

    async def forget(self, address: str) -> None:
        """Do nothing: there are no connections."""

    def mailboxes(self, address: str) -> list[str]:
        """Return the mailboxes of the changes of which a proxy was told."""
        return [each.mailbox for each in self.changes.get(address, [])]
