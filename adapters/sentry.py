"""A middleware of workers that reports the errors of handlers to Sentry."""

from typing import Any

import sentry_sdk

from postroom.application.received_messages import ReceivedMessage
from postroom.application.workers.handler import Handle
from postroom.application.workers.retry import RetryLater
from postroom.domain.errors import PoisonMessage


def sentry(next_: Handle) -> Handle:
    """Report the errors of handlers to Sentry, in a scope of its own for each message.

    `Reject`, `PoisonMessage` and `RetryLater` are not reported. The application calls `sentry_sdk.init`,
    which decides what is sent: values of local variables, too, unless it has `include_local_variables=False`.

    Arguments:
        next_: the handler, or the next middleware.
    """

    async def handle(message: ReceivedMessage) -> Any:
        with sentry_sdk.isolation_scope() as scope:
            scope.set_transaction_name(f"process {message.topic}", source="task")
            scope.set_tag("topic", message.topic)
            facts = {"id": message.message_id, "attempt": message.attempt}
            scope.set_context("message", facts)
            try:
                return await next_(message)
            except (PoisonMessage, RetryLater):
                raise
            except Exception as error:
                sentry_sdk.capture_exception(error)
                raise

    return handle
