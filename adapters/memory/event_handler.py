"""The event handler port over a function in this process, without HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from postroom.application.ports.inbox import HandlerRequest
from postroom.application.telemetry import summarize
from postroom.domain.errors import DuplicateInboxMessage, PoisonMessage
from postroom.domain.inbox import PROCESSED, HandlerResult


class FunctionEventHandler:
    """Handler that calls a coroutine function, such as the result of `pipeline`.

    Returning means processed. `DuplicateInboxMessage` means already processed, `PoisonMessage` poison, and
    any other error is a failure that is retried.

    Arguments:
        timeout_ms: time after which the function is cancelled and has failed; None for no limit.
    """

    def __init__(
        self, function: Callable[[HandlerRequest], Awaitable[Any]], *, timeout_ms: int | None = None
    ) -> None:
        self._function = function
        self._timeout_ms = timeout_ms

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Call the function and return the result."""
        limit = asyncio.timeout(self._timeout_ms and self._timeout_ms / 1_000)
        try:
            async with limit:
                await self._function(request)
        except DuplicateInboxMessage:
            return HandlerResult("already_processed")
        except PoisonMessage as error:
            return HandlerResult("poison", str(error))
        except Exception as error:
            if limit.expired():
                return HandlerResult("failed", f"the handler did not return within {self._timeout_ms:,} ms")
            return HandlerResult("failed", summarize(error))
        return PROCESSED

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
