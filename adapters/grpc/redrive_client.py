"""Redrive jobs over gRPC."""

from abc import abstractmethod
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.redrive.spec import JobAction, RedriveSpec


class GrpcRedrives:
    """The calls of `Redrives`, of `MailboxTransport`."""

    @abstractmethod
    async def _call(self, name: str, request: Any) -> Any:
        """Return the answer of a method."""

    async def preview_redrive(self, spec: RedriveSpec) -> RedrivePreview:
        """Return the dead letters that a job would select."""
        request = pb.PreviewRedriveRequest(spec=_write_spec(spec))
        return messages.read_result(await self._call("preview_redrive", request), RedrivePreview)

    async def start_redrive(self, spec: RedriveSpec, job_id: str) -> RedriveReport:
        """Start a job."""
        request = pb.StartRedriveRequest(spec=_write_spec(spec), job_id=job_id)
        return _read(await self._call("start_redrive", request))

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs."""
        response = await self._call("list_redrives", pb.ListRedrivesRequest())
        return [messages.read_result(each, RedriveReport) for each in response.jobs]

    async def get_redrive(self, job_id: str) -> RedriveReport:
        """Return a job."""
        return _read(await self._call("get_redrive", pb.GetRedriveRequest(job_id=job_id)))

    async def list_redrive_messages(
        self, job_id: str, outcome: Outcome | None, cursor: str | None, limit: int
    ) -> RedriveMessages:
        """Return a page of the messages of a redrive job."""
        request = pb.ListRedriveMessagesRequest(job_id=job_id, outcome=outcome, cursor=cursor, limit=limit)
        return messages.read_result(await self._call("list_redrive_messages", request), RedriveMessages)

    async def change_redrive(self, job_id: str, action: JobAction) -> RedriveReport:
        """Pause, resume, cancel or undo a job."""
        request = pb.ChangeRedriveRequest(job_id=job_id, action=action)
        return _read(await self._call("change_redrive", request))


def _write_spec(spec: RedriveSpec) -> pb.RedriveSpec:
    # The default action is written, too, so that an answer is read without knowing it.
    return ParseDict(msgspec.to_builtins(spec) | {"action": spec.action}, pb.RedriveSpec())


def _read(response: Any) -> RedriveReport:
    return messages.read_result(response.job, RedriveReport)
