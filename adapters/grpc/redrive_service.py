"""Redrive jobs of `postroom.v1.MailboxAdmin`."""

from typing import Any, Protocol, cast

import msgspec
from google.protobuf.json_format import ParseDict

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.ports.mailbox import Mailbox
from postroom.application.redrive_results import RedriveReport
from postroom.domain.errors import InvalidRequest
from postroom.domain.redrive.spec import JobAction, RedriveSpec


class AcceptedCall(Protocol):
    """A call that was accepted."""

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox as the caller may use it."""


class RedriveService:
    """The methods of redrive jobs."""

    async def preview_redrive(
        self, request: pb.PreviewRedriveRequest, call: AcceptedCall
    ) -> pb.PreviewRedriveResponse:
        """Return the dead letters that a job would select."""
        preview = await call.mailbox.preview_redrive(read_spec(request.spec))
        return messages.write_result(preview, pb.PreviewRedriveResponse())

    async def start_redrive(
        self, request: pb.StartRedriveRequest, call: AcceptedCall
    ) -> pb.StartRedriveResponse:
        """Start a job."""
        job_id = request.job_id if request.HasField("job_id") else None
        report = await call.mailbox.start_redrive(read_spec(request.spec), job_id=job_id)
        return pb.StartRedriveResponse(job=_write(report))

    async def list_redrives(
        self, request: pb.ListRedrivesRequest, call: AcceptedCall
    ) -> pb.ListRedrivesResponse:
        """Return the jobs."""
        return pb.ListRedrivesResponse(jobs=map(_write, await call.mailbox.list_redrives()))

    async def get_redrive(self, request: pb.GetRedriveRequest, call: AcceptedCall) -> pb.GetRedriveResponse:
        """Return a job."""
        return pb.GetRedriveResponse(job=_write(await call.mailbox.get_redrive(request.job_id)))

    async def list_redrive_messages(
        self, request: pb.ListRedriveMessagesRequest, call: AcceptedCall
    ) -> pb.ListRedriveMessagesResponse:
        """Return a page of the messages of a job."""
        options: dict[str, Any] = messages.set_fields(request)
        page = await call.mailbox.list_redrive_messages(options.pop("job_id", ""), **options)
        return messages.write_result(page, pb.ListRedriveMessagesResponse())

    async def change_redrive(
        self, request: pb.ChangeRedriveRequest, call: AcceptedCall
    ) -> pb.ChangeRedriveResponse:
        """Pause, resume, cancel or undo a job."""
        action = cast(JobAction, request.action)  # the mailbox refuses others
        report = await call.mailbox.change_redrive(request.job_id, action)
        return pb.ChangeRedriveResponse(job=_write(report))


def read_spec(message: pb.RedriveSpec) -> RedriveSpec:
    """Return the specification of a job; the mailbox validates it.

    Raises: InvalidRequest for an unknown action.
    """
    fields: dict[str, Any] = messages.set_fields(message)
    for name, value in fields.items():
        if message.DESCRIPTOR.fields_by_name[name].is_repeated and not isinstance(value, dict):
            fields[name] = tuple(value)
    try:
        return msgspec.convert(fields, RedriveSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The redrive specification is wrong: {error}.") from None


def _write(report: RedriveReport) -> pb.RedriveReport:
    values = msgspec.to_builtins(report)
    values["spec"]["action"] = report.spec.action  # its default, too, for callers in other languages
    return ParseDict(values, pb.RedriveReport())
