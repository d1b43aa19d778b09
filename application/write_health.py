"""Whether a service takes writes, which is degraded before reads are (svc-mailbox P-2)."""

import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from postroom.application.messages import Sent
from postroom.domain.errors import PostroomError, Rejected, Saturated, Unavailable

T = TypeVar("T", bound=Sent | Sequence[Sent | Rejected])

RECOVERY_SECONDS = 5.0
"""Time after which a refusal no longer counts: callers that heed a service that takes no writes send none."""


class WriteHealth:
    """Outcome of the latest sends over all surfaces of a service.

    Refusals count that the next sender may meet as well: the mailbox is saturated, or its store can't be
    written. Those by a caller's quota do not.
    """

    def __init__(self) -> None:
        self._refused_at: float | None = None

    @property
    def takes_writes(self) -> bool:
        """Return whether no send was refused lately, or one was accepted since."""
        return self._refused_at is None or time.monotonic() - self._refused_at > RECOVERY_SECONDS

    async def watch(self, sending: Awaitable[T]) -> T:
        """Return the answer of a send, or its error."""
        try:
            answer = await sending
        except PostroomError as error:
            self._note([error])
            raise
        self._note([answer] if isinstance(answer, Sent) else answer)
        return answer

    def _note(self, answers: Sequence[Sent | PostroomError]) -> None:
        if any(isinstance(each, Sent) for each in answers):
            self._refused_at = None
        elif any(_is_general(each) for each in answers):
            self._refused_at = time.monotonic()


def _is_general(answer: Sent | PostroomError) -> bool:
    # The owner of the mailbox counts its refusals, and nobody those of quotas.
    return isinstance(answer, Unavailable) or (isinstance(answer, Saturated) and answer.is_counted)
