"""The event handler port over a function of this process: a worker without HTTP in between."""

from collections.abc import Awaitable, Callable
from typing import Any

from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.errors import DuplicateInboxMessage, PoisonMessage
from postroom.domain.inbox import PROCESSED, HandlerResult


class FunctionEventHandler:
    """Hand events to a coroutine function, such as what `pipeline` returns.

    Returning means processed. Raising `DuplicateInboxMessage` says that it was before, `PoisonMessage` that
    it never will be, and everything else that it may be tried again.
    """

    def __init__(self, function: Callable[[HandlerRequest], Awaitable[Any]]) -> None:
        """Take the function."""
        self._function = function

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Call the function and return what its ending means."""
        try:
            await self._function(request)
        except DuplicateInboxMessage:
            return HandlerResult("already_processed")
        except PoisonMessage as error:
            return HandlerResult("poison", str(error))
        except Exception as error:
            return HandlerResult("failed", repr(error))
        return PROCESSED

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
