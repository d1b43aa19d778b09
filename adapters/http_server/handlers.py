"""Handlers of the calls: they translate between HTTP and the mailbox, and decide nothing."""

from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from postroom.adapters.http_server import schemas
from postroom.adapters.http_server.call import Call, Reply, json_reply
from postroom.adapters.http_server.problems import DuplicateMessage, brief
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.http_server.stream import MessageStream, receive_or_stop
from postroom.application.caller import call_as
from postroom.application.delivery_window import extended_receipts, finished_receipts
from postroom.application.messages import NewMessage, Sent, read_receipt
from postroom.application.service import Service
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Rejected
from postroom.domain.message import Receipt
from postroom.domain.names import may_have_id, message_stream


class MessageHandlers:
    """Handlers of send, recv, ack, nack and extend."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service = service
        self._settings = settings

    async def send(self, call: Call) -> Reply:
        """Send one message, a list, or what a CloudEvent has become."""
        body: schemas.Send | list[schemas.Send] | NewMessage = call.body
        as_conflict = _as_conflict(call)
        if isinstance(body, list):
            messages = [each.to_message(call.corr_id) for each in body]
            answers = await self._service.writes.watch(call.mailbox.send_batch(messages))
            return json_reply(schemas.SendAnswers([_send_result(each, as_conflict) for each in answers]))
        message = body if isinstance(body, NewMessage) else body.to_message(call.corr_id)
        sent = await self._service.writes.watch(call.mailbox.send_message(message))
        if sent.duplicate and as_conflict:
            raise DuplicateMessage(sent.message_id)
        return json_reply(schemas.SendAnswer(sent.message_id, sent.duplicate, sent.message_id))

    async def recv(self, call: Call) -> Reply:
        """Receive messages; what a client that has gone can't get is ready again at once."""
        body: schemas.Recv = call.body
        messages = await receive_or_stop(
            self._service, call.mailbox, body, body.max_messages, body.wait_ms or 0, call.closed
        )
        if call.closed.is_set():
            await self._return_messages([message.receipt for message in messages])
        envelopes = [schemas.to_envelope(each, with_envelope=body.with_envelope) for each in messages]
        return json_reply(schemas.Messages(envelopes))

    async def recv_stream(self, call: Call) -> Reply:
        """Receive messages for as long as the client reads."""
        heartbeat_ms = call.body.heartbeat_ms or self._settings.heartbeat_ms
        stream = MessageStream(self._service, call, heartbeat_ms)
        return Reply(stream.lines(), content_type=b"application/x-ndjson")

    async def ack(self, call: Call) -> Reply:
        """Settle a delivery."""
        receipt = await self._receipt(call)
        _raise_refusal(await call.mailbox.ack_messages([receipt]))
        self._note([receipt])
        return json_reply(schemas.Ok())

    async def nack(self, call: Call) -> Reply:
        """Fail a delivery."""
        receipt, body = await self._receipt(call), call.body
        answers = await call.mailbox.nack_messages([receipt], reason=body.reason, delay_ms=body.delay_ms)
        _raise_refusal(answers)
        self._note([receipt])
        return json_reply(schemas.Ok())

    async def extend(self, call: Call) -> Reply:
        """Extend a delivery."""
        receipt = await self._receipt(call)
        _raise_refusal(await call.mailbox.extend_visibility([receipt], call.body.visibility_ms))
        self._note([receipt], call.body.visibility_ms)
        return json_reply(schemas.Ok())

    async def ack_many(self, call: Call) -> Reply:
        """Settle deliveries."""
        receipts = [read_receipt(each) for each in call.body.receipts]
        answers = await call.mailbox.ack_messages(receipts)
        self._note(finished_receipts(receipts, answers))
        return _settle_results(answers)

    async def nack_many(self, call: Call) -> Reply:
        """Fail deliveries."""
        receipts, body = [read_receipt(each) for each in call.body.receipts], call.body
        answers = await call.mailbox.nack_messages(receipts, reason=body.reason, delay_ms=body.delay_ms)
        self._note(finished_receipts(receipts, answers))
        return _settle_results(answers)

    async def extend_many(self, call: Call) -> Reply:
        """Extend deliveries."""
        receipts = [read_receipt(each) for each in call.body.receipts]
        answers = await call.mailbox.extend_visibility(receipts, call.body.visibility_ms)
        self._note(extended_receipts(receipts, answers), call.body.visibility_ms)
        return _settle_results(answers)

    async def _receipt(self, call: Call) -> Receipt:
        """Return the receipt of the body, or that of the message's latest delivery."""
        id_ = call.path["msg_id"]
        if call.body.receipt is None:
            with call_as(call.session.caller):  # who means a message of a topic that the token covers
                return await self._latest_receipt(id_)
        receipt = read_receipt(call.body.receipt)
        if not may_have_id(receipt.message, self._service.mailbox.name, id_):
            raise InvalidRequest(f"The receipt is of another message than {id_}.")
        return receipt

    async def _latest_receipt(self, id_: str) -> Receipt:
        """Return the receipt of the latest delivery of a message.

        It needs no right: settling checks whether the caller may use the receipt. An unknown message gets a
        receipt, too, which hides from callers without the right whether a message exists.
        """
        mailbox = self._service.mailbox
        try:
            detail = await mailbox.get_message(id_)
        except NotFound:
            return Receipt(message_stream(mailbox.name, id_), 1, 0)
        stream, history = UUID(detail.stream_id).bytes, detail.history
        deliveries = [n for n, each in enumerate(history) if each.event == "MessageReceived"]
        if not deliveries:
            return Receipt(stream, 1, 0)
        latest = deliveries[-1]
        return Receipt(stream, latest + 1, history[latest].epoch)  # a stream's versions count from 1

    def _note(self, receipts: Sequence[Receipt], visibility_ms: int | None = None) -> None:
        if visibility_ms is None:
            self._service.streams.settle(receipts)
        else:
            self._service.streams.extend(receipts, visibility_ms)

    async def _return_messages(self, receipts: list[Receipt]) -> None:
        if receipts:
            with suppress(PostroomError):  # their visibility timeout does it otherwise
                await self._service.mailbox.nack_messages(receipts, reason="client disconnected", delay_ms=0)


def _as_conflict(call: Call) -> bool:
    mode = call.headers.get(b"x-idempotency-mode")
    if mode not in (None, b"409-conflict"):
        raise InvalidRequest("X-Idempotency-Mode must be 409-conflict, or absent.")
    return mode is not None


def _send_result(answer: Sent | Rejected, as_conflict: bool) -> schemas.SendResult:
    if isinstance(answer, Rejected):
        return schemas.SendResult(error=brief(answer))
    if answer.duplicate and as_conflict:
        error = brief(DuplicateMessage(answer.message_id))
        return schemas.SendResult(answer.message_id, None, answer.message_id, error)
    return schemas.SendResult(answer.message_id, answer.duplicate, answer.message_id)


def _settle_results(answers: Sequence[Rejected | None]) -> Reply:
    results = [
        schemas.SettleResult(answer is None, brief(answer) if answer is not None else None)
        for answer in answers
    ]
    return json_reply(schemas.SettleResults(results))


def _raise_refusal(answers: Sequence[Rejected | None]) -> None:
    (refusal,) = answers
    if refusal is not None:
        raise refusal
