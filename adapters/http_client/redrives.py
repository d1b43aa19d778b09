"""Redrive jobs over the HTTP interface."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.redrive.spec import JobAction, RedriveSpec

T = TypeVar("T")


class RedriveReports(msgspec.Struct, frozen=True):
    """Redrive jobs."""

    jobs: list[RedriveReport]


class HttpRedrives:
    """The calls of `Redrives`, of `MailboxTransport`."""

    @abstractmethod
    async def _post(self, path: str, body: object, answer: type[T]) -> T:
        """Return the answer to a POST."""

    @abstractmethod
    async def _get(self, path: str, answer: type[T], query: Mapping[str, object] | None = None) -> T:
        """Return the answer to a GET."""

    @abstractmethod
    async def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> T:
        """Return the answer to a request."""

    async def preview_redrive(self, spec: RedriveSpec) -> RedrivePreview:
        """Return the dead letters that a job would select."""
        return await self._post("/v1/redrives/preview", spec, RedrivePreview)

    async def start_redrive(self, spec: RedriveSpec, job_id: str) -> RedriveReport:
        """Start a job."""
        return await self._post("/v1/redrives", {"job_id": job_id, "spec": spec}, RedriveReport)

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs."""
        return (await self._get("/v1/redrives", RedriveReports)).jobs

    async def get_redrive(self, job_id: str) -> RedriveReport:
        """Return a job."""
        return await self._get(f"/v1/redrives/{job_id}", RedriveReport)

    async def list_redrive_messages(
        self, job_id: str, outcome: Outcome | None, cursor: str | None, limit: int
    ) -> RedriveMessages:
        """Return a page of the messages of a redrive job."""
        query = {"outcome": outcome, "cursor": cursor, "limit": limit}
        return await self._get(f"/v1/redrives/{job_id}/messages", RedriveMessages, query)

    async def change_redrive(self, job_id: str, action: JobAction) -> RedriveReport:
        """Pause, resume, cancel or undo a job."""
        return await self._call("PUT", f"/v1/redrives/{job_id}/{action}", RedriveReport)
