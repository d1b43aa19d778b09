"""Which mailbox of a namespace made a delivery."""

from collections.abc import Iterable

from postroom.domain.message import Receipt

MAX_RECEIPTS = 100_000


class ReceiptHomes:
    """The mailboxes of the latest deliveries of this process; those of older ones have to be asked for."""

    def __init__(self) -> None:
        self._homes: dict[bytes, str] = {}

    def add(self, receipts: Iterable[Receipt], mailbox: str) -> None:
        """Note who delivered messages."""
        for receipt in receipts:
            self._homes.pop(receipt.message, None)
            self._homes[receipt.message] = mailbox
        while len(self._homes) > MAX_RECEIPTS:
            del self._homes[next(iter(self._homes))]

    def get(self, receipt: Receipt) -> str | None:
        """Return the mailbox that delivered a message, if it is known."""
        return self._homes.get(receipt.message)
