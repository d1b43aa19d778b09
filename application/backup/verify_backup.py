"""`VerifyBackup`: verify the logs of a backup up to the heads that its manifest names."""

from collections.abc import Callable
from contextlib import closing

from postroom.application.access.read_audit import verify_audit
from postroom.application.backup.manifest import Manifest
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import Verification, VerifyLog
from postroom.domain.errors import BrokenLog
from postroom.domain.names import AUDIT_LOG


class VerifyBackup:
    """A verification of every hash of every log of a backup; needs neither the store nor its server.

    Arguments:
        open_log: opens the log of a mailbox in the backup.
    """

    def __init__(self, where: str, open_log: Callable[[str], EventLogReader]) -> None:
        self._where = where
        self._open_log = open_log

    def __call__(
        self, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
    ) -> list[Verification]:
        """Return the verification of each log.

        Arguments:
            progress: called with the number of records that were verified.

        Raises: BrokenLog when a log is not the one that the manifest describes.
        """
        verifications: list[Verification] = []
        done = 0
        for head in manifest.mailboxes:
            with closing(self._open_log(head.mailbox)) as log:
                try:
                    verification = _verification(log)(
                        expected_last=head.position,
                        expected_chain=head.chain,
                        progress=lambda position, start=done - head.first: progress(start + position),  # type: ignore[misc]
                    )
                except BrokenLog as error:
                    message = f"The backup {self._where} is not intact; use another one. {error}"
                    raise BrokenLog(message, error.position) from error
            if (verification.last, verification.chain) != (head.position, head.chain):
                raise BrokenLog(
                    f"The backup {self._where} is not intact; use another one. Its log of mailbox "
                    f"{head.mailbox} ends at position {verification.last}, not at {head.position}.",
                    head.position,
                )
            done += head.position - head.first + 1 if head.first else 0
            verifications.append(verification)
        return verifications


def _verification(log: EventLogReader) -> VerifyLog:
    """Return the verification of a log, according to how retention records what it removed from it."""
    return verify_audit(log) if log.mailbox == AUDIT_LOG else VerifyLog(log)
