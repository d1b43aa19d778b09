"""Handlers and routes of redrive jobs."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from postroom.adapters.http_server.call import Call, Reply, json_reply
from postroom.adapters.http_server.routes import Route
from postroom.adapters.http_server.schemas import Limit, Text
from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.redrive.spec import JOB_ACTIONS, JobAction, RedriveSpec

_JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
_SPEC = {"topics": ["orders.*"], "reasons": ["max_attempts"], "rate": 100}


class StartRedrive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job to start.

    Arguments:
        job_id: a UUID; starting the same job again changes nothing. Without one, it gets a UUIDv7.
    """

    spec: RedriveSpec
    job_id: str | None = None


class RedriveReports(msgspec.Struct, frozen=True):
    """Redrive jobs, newest first."""

    jobs: list[RedriveReport]


class RedriveMessagesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the list of a job's messages."""

    outcome: Outcome | None = None
    limit: Limit = 100
    cursor: Annotated[Text | None, Meta(description="next_cursor of the previous page.")] = None


class RedriveHandlers:
    """Handlers of redrive jobs."""

    async def preview_redrive(self, call: Call) -> Reply:
        """Return the dead letters that a job would select."""
        return json_reply(await call.mailbox.preview_redrive(call.body))

    async def start_redrive(self, call: Call) -> Reply:
        """Start a job."""
        body: StartRedrive = call.body
        return json_reply(await call.mailbox.start_redrive(body.spec, job_id=body.job_id))

    async def list_redrives(self, call: Call) -> Reply:
        """Return the jobs."""
        return json_reply(RedriveReports(await call.mailbox.list_redrives()))

    async def get_redrive(self, call: Call) -> Reply:
        """Return a job."""
        return json_reply(await call.mailbox.get_redrive(call.path["job_id"]))

    async def list_redrive_messages(self, call: Call) -> Reply:
        """Return a page of the messages of a job."""
        query: RedriveMessagesQuery = call.query
        return json_reply(
            await call.mailbox.list_redrive_messages(
                call.path["job_id"], outcome=query.outcome, cursor=query.cursor, limit=query.limit
            )
        )

    async def pause_redrive(self, call: Call) -> Reply:
        """Pause a job."""
        return await self._change(call, "pause")

    async def resume_redrive(self, call: Call) -> Reply:
        """Resume a job."""
        return await self._change(call, "resume")

    async def cancel_redrive(self, call: Call) -> Reply:
        """Cancel a job."""
        return await self._change(call, "cancel")

    async def undo_redrive(self, call: Call) -> Reply:
        """Undo a job."""
        return await self._change(call, "undo")

    async def _change(self, call: Call, action: JobAction) -> Reply:
        return json_reply(await call.mailbox.change_redrive(call.path["job_id"], action))


_SUMMARIES: dict[JobAction, str] = {
    "pause": "Pause a redrive job; idempotent.",
    "resume": "Resume a redrive job; idempotent.",
    "cancel": "Cancel a redrive job; what it did stays done. Idempotent.",
    "undo": "Make the messages of a redrive job dead letters again if nobody received them; idempotent.",
}


def redrive_routes() -> Sequence[Route]:
    """Return the routes of redrive jobs."""
    handlers = RedriveHandlers()
    changes = {
        "pause": handlers.pause_redrive,
        "resume": handlers.resume_redrive,
        "cancel": handlers.cancel_redrive,
        "undo": handlers.undo_redrive,
    }
    start: Any = {"job_id": _JOB, "spec": _SPEC}
    return (
        Route(
            "POST",
            "/v1/redrives/preview",
            handlers.preview_redrive,
            "Return which dead letters a redrive job would select, with counts and samples.",
            RedrivePreview,
            RedriveSpec,
            examples=(_SPEC, None),
        ),
        Route(
            "POST",
            "/v1/redrives",
            handlers.start_redrive,
            "Start a job that redrives, archives or purges the dead letters of a query.",
            RedriveReport,
            StartRedrive,
            refusals=(409,),
            examples=(start, None),
        ),
        Route(
            "GET", "/v1/redrives", handlers.list_redrives, "List redrive jobs, newest first.", RedriveReports
        ),
        Route(
            "GET",
            "/v1/redrives/{job_id}",
            handlers.get_redrive,
            "Return a redrive job with its progress.",
            RedriveReport,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/redrives/{job_id}/messages",
            handlers.list_redrive_messages,
            "Return a page of the messages of a redrive job, with what it did with each.",
            RedriveMessages,
            query=RedriveMessagesQuery,
            refusals=(404,),
        ),
        *(
            Route(
                "PUT",
                f"/v1/redrives/{{job_id}}/{action}",
                changes[action],
                _SUMMARIES[action],
                RedriveReport,
                refusals=(404,),
            )
            for action in JOB_ACTIONS
        ),
    )
