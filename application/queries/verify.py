"""`VerifyLog`: check that no record of a log was cut, moved or edited, and every message is intact."""

from collections.abc import Callable

import msgspec

from postroom.application.codec import to_event
from postroom.application.fold import check_seal
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import BrokenLog
from postroom.domain.integrity import is_intact
from postroom.domain.mailbox.events import LogTruncated
from postroom.domain.message import MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.record import GENESIS, Record, chained

PROGRESS_RECORDS = 10_000


class Verification(msgspec.Struct, frozen=True):
    """What was checked: records from `first` to `last`, and the chain hash of the last one, as hex.

    Whoever keeps `last` and `chain` outside the store can prove later that nothing before it was rewritten.
    """

    mailbox: str
    first: int
    last: int
    messages: int
    chain: str


class VerifyLog:
    """Recompute every hash of a mailbox's log (svc-mailbox I-12, and the chain of records)."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __call__(
        self,
        *,
        expected_last: int | None = None,
        expected_chain: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Verification:
        """Verify the whole log.

        Arguments:
            expected_last, expected_chain: what an earlier verification reported; finds a log cut or
                rewritten since.
            progress: is told the position reached, every 10,000 records.

        Raises: BrokenLog naming the first position that does not hold.
        """
        start, chain = self._start()
        last, messages = start, 0
        for record in chained(self._log.read(start), chain, start + 1):
            last, chain = record.position, record.chain
            if last == expected_last and chain.hex() != expected_chain:
                raise BrokenLog(
                    f"The log record at position {last} has another chain hash than before: the log was "
                    "rewritten. Restore the store from a backup.",
                    last,
                )
            messages += _is_intact_message(record)
            if last % PROGRESS_RECORDS == 0:
                progress(last)
        check_seal(self._log)
        if expected_last is not None and last < expected_last:
            raise BrokenLog(
                f"The log of mailbox {self._log.mailbox} ends at position {last}, but it reached "
                f"{expected_last} before: its end was cut off. Restore the store from a backup.",
                last + 1,
            )
        return Verification(self._log.mailbox, start + 1, last, messages, chain.hex())

    def _start(self) -> tuple[int, bytes]:
        """Return where to start: position 0, or where retention cut, with the chain hash recorded there."""
        first = self._log.first_position()
        if first is None or first == 1:
            return 0, GENESIS
        truncations = [
            event
            for record in self._log.history(mailbox_stream(self._log.mailbox))
            if isinstance(event := to_event(record), LogTruncated)
        ]
        fitting = [each for each in truncations if each.through >= first - 1]
        if fitting:
            oldest = min(fitting, key=lambda truncation: truncation.through)
            return oldest.through, oldest.link
        raise BrokenLog(
            f"The log of mailbox {self._log.mailbox} starts at position {first}, and no retention accounts "
            "for it. Restore the store from a backup.",
            first,
        )


def _is_intact_message(record: Record) -> bool:
    """Tell whether the record is a message, which then is intact; raise `BrokenLog` where it isn't."""
    if record.envelope is None:
        return False
    event = to_event(record)
    if isinstance(event, MessageSent) and not is_intact(event):
        raise BrokenLog(
            f"The message at position {record.position} does not match its payload hash: its envelope was "
            "altered. Restore the store from a backup.",
            record.position,
        )
    return True
