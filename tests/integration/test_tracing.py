"""Spans of messaging operations, and the trace context that calls, messages and events carry."""

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

import aiohttp
import psycopg
import pytest
import sentry_sdk
from opentelemetry import baggage, context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from postroom import (
    MessagingSettings,
    NewEvent,
    NewMessage,
    NotFound,
    OutboxSettings,
    ReceivedMessage,
    Reject,
    Retry,
    RetryLater,
    TopicPolicy,
    Worker,
    connect,
    open_mailbox,
    open_relay,
    outbox,
    sentry,
    transaction,
)
from postroom.adapters.compose.process import export_traces
from postroom.application import tracing
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.tracing import SAMPLED, NullTracer, TraceContext, tracer, use_tracer
from tests.integration.inbox_world import opened_world
from tests.support.logs import capture_logs
from tests.support.spans import capture_spans, link_ids, parent_id, span_id, trace_id
from tests.support.surfaces import served

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
RECORDED = 3
"""Trace flags of OpenTelemetry's own traces: sampled, with a random id."""
ORDER = NewMessage(topic="orders", payload=b"canary-payload", principal="canary-principal")


async def test_a_send_is_a_producer_span_that_the_message_refers_to() -> None:
    with capture_spans() as spans:
        async with open_mailbox("memory:") as mailbox:
            sent = await mailbox.send_message(ORDER)
            (message,) = await mailbox.receive_messages("orders")
            await message.ack()
    send, receive, ack = spans.one("send orders"), spans.one("receive orders"), spans.one("ack")
    assert (send.kind, receive.kind, ack.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CLIENT)
    assert dict(send.attributes or {}) == {
        "messaging.system": "postroom",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": sent.message_id,
    }
    assert dict(receive.attributes or {})["messaging.batch.message_count"] == 1
    assert dict(ack.attributes or {})["messaging.operation.type"] == "settle"
    assert message.trace_context == TraceContext(trace_id(send), span_id(send), RECORDED)
    assert (message.trace_id, message.span_id) == (trace_id(send), span_id(send))
    assert link_ids(receive) == [span_id(send)]


async def test_a_receive_without_messages_leaves_no_span() -> None:
    with capture_spans() as spans:
        async with open_mailbox("memory:") as mailbox:
            await mailbox.receive_messages("orders")
    assert spans.names() == []


async def test_a_batch_has_one_span_with_the_number_of_its_messages() -> None:
    with capture_spans() as spans:
        async with open_mailbox("memory:") as mailbox:
            await mailbox.send_batch([ORDER, NewMessage(topic="other", payload=b""), ORDER])
    (span,) = spans.all()
    assert span.name == "send"  # to several topics
    assert dict(span.attributes or {})["messaging.batch.message_count"] == 3


async def test_a_worker_processes_a_message_in_the_trace_of_its_sender() -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def confirm(message: ReceivedMessage) -> None:
        await mailbox.send_message(NewMessage(topic="confirmations", payload=b""))
        raise ValueError("canary-payload")

    with capture_spans() as spans:
        async with open_mailbox("memory:", default_policy=TopicPolicy(max_attempts=1)) as mailbox:
            await mailbox.send_message(ORDER)
            await worker.run(mailbox, once=True)
    send, process, answer = (
        spans.one(each) for each in ("send orders", "process orders", "send confirmations")
    )
    assert process.kind == SpanKind.CONSUMER
    assert parent_id(process) == span_id(send)
    assert link_ids(process) == [span_id(send)]
    assert parent_id(answer) == span_id(process)
    assert {trace_id(each) for each in (send, process, answer)} == {trace_id(send)}
    assert process.status.status_code == StatusCode.ERROR
    assert dict(process.attributes or {})["error.type"] == "ValueError"
    assert "nack" in spans.names()
    for span in spans.all():
        assert "canary" not in span.to_json()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_client_and_its_server_are_in_one_trace(protocol: str) -> None:
    with capture_spans() as spans:
        async with (
            open_mailbox("memory:") as mailbox,
            served(mailbox, protocol) as url,
            connect(url) as client,
        ):
            await client.send_message(ORDER)
            (message,) = await client.receive_messages("orders")
            await client.redrive_dead_letters("orders")
            with pytest.raises(NotFound):
                await client.get_message("none")
    refusal = [each for each in spans.all() if each.kind == SpanKind.SERVER][-1]
    if protocol == "grpc":
        assert dict(refusal.attributes or {})["error.type"] == "E_NOT_FOUND"
    else:
        assert dict(refusal.attributes or {})["http.response.status_code"] == 404
    calls = [span for span in spans.all() if span.kind == SpanKind.SERVER]
    producer = next(span for span in spans.all() if span.kind == SpanKind.PRODUCER)
    caller = next(span for span in spans.all() if span.name == "send orders" and span.kind == SpanKind.CLIENT)
    (call,) = (span for span in calls if span_id(span) == parent_id(producer))
    assert call.name == ("POST /v1/send" if protocol == "http" else "postroom.v1.Mailbox/Send")
    assert parent_id(call) == span_id(caller)
    assert message.trace_context == TraceContext(trace_id(caller), span_id(producer), RECORDED)
    assert spans.names().count("redrive orders") == 2


async def test_a_server_without_opentelemetry_passes_the_callers_trace_on_to_the_message() -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=a:1", "baggage": "tier=gold,user=Zo%C3%AB"}
    async with (
        open_mailbox("memory:") as mailbox,
        served(mailbox, "http") as url,
        aiohttp.ClientSession(url) as session,
    ):
        body = {"topic": "orders", "payload_b64": ""}
        with capture_logs() as events:
            async with session.post("/v1/send", json=body, headers=headers) as answer:
                assert answer.status == 200
        async with session.post("/v1/send", json=body, headers={"traceparent": "00-no-trace-01"}) as answer:
            assert answer.status == 200
        traced, untraced = await mailbox.receive_messages("orders")
    expected = TraceContext(TRACE, SPAN, 1, "vendor=a:1", {"tier": "gold", "user": "Zoë"})
    assert traced.trace_context == expected
    assert untraced.trace_context is None
    assert {each["trace_id"] for each in events} == {TRACE}
    assert tracer().current() is None


async def test_the_next_request_of_a_connection_is_not_in_the_trace_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = b'{"topic":"orders","payload_b64":""}'
    head = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    end = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with open_mailbox("memory:") as mailbox, served(mailbox, "http") as url:
        monkeypatch.setattr(tracing, "_tracer", NullTracer())  # as without OpenTelemetry
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        trace = b"traceparent: %b\r\nbaggage: tier=gold\r\n" % TRACEPARENT.encode()
        writer.write(head + trace + end + head + end)
        async with asyncio.timeout(30):
            for _ in range(2):
                await reader.readuntil(b'"duplicate":false')
        writer.close()
        await writer.wait_closed()
        traced, untraced = await mailbox.receive_messages("orders")
    assert traced.trace_context == TraceContext(TRACE, SPAN, 1, "", {"tier": "gold"})
    assert untraced.trace_context is None


async def test_baggage_reaches_the_handler_of_a_message() -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders")
    def handle(message: ReceivedMessage) -> None:
        seen.append(baggage.get_baggage("tier"))

    with capture_spans():
        async with open_mailbox("memory:") as mailbox:
            token = context.attach(baggage.set_baggage("tier", "gold"))
            await mailbox.send_message(ORDER)
            context.detach(token)
            await worker.run(mailbox, once=True)
    assert seen == ["gold"]


async def test_a_trace_that_is_not_sampled_is_not_recorded_anywhere() -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def handle(message: ReceivedMessage) -> None:
        await mailbox.send_message(NewMessage(topic="confirmations", payload=b""))

    async with open_mailbox("memory:") as mailbox:
        with capture_spans(ALWAYS_OFF):
            await mailbox.send_message(ORDER)
        with capture_spans() as spans:
            await worker.run(mailbox, once=True)
            (confirmation,) = await mailbox.receive_messages("confirmations")
    assert {"process orders", "send confirmations"}.isdisjoint(spans.names())
    assert confirmation.trace_context is not None
    assert not confirmation.trace_context.trace_flags & SAMPLED


async def test_an_http_request_a_worker_an_outbox_and_an_inbox_are_one_trace(
    nats_url: str, messaging_database: str
) -> None:
    worker = Worker(
        middlewares=[transaction(lambda: psycopg.AsyncConnection.connect(messaging_database)), outbox()]
    )
    handled: list[TraceContext | None] = []

    @worker.consumer("orders")
    async def place(message: ReceivedMessage) -> list[NewEvent]:
        return [NewEvent(aggregate_type="order", aggregate_id="1", event_type="order_placed", payload={})]

    async def confirm(request: HandlerRequest) -> None:
        handled.append(tracer().current())

    shop = MessagingSettings(messaging_database, "shop")
    with capture_spans() as spans:
        async with opened_world(nats_url, messaging_database) as world, open_mailbox("memory:") as mailbox:
            await world.make_streams()
            async with (
                served(mailbox, "http") as url,
                aiohttp.ClientSession(url, headers={"traceparent": TRACEPARENT}) as session,
                session.post("/v1/send", json={"topic": "orders", "payload_b64": ""}) as answer,
            ):
                assert answer.status == 200
            assert (await worker.run(mailbox, once=True)).handled == 1
            async with open_relay(shop, world.nats, OutboxSettings(hints=False)) as relay:
                assert await relay.relay_once() == 1
            await world.work(confirm)
    event = "shop.event.order_placed.v1"
    names = ["POST /v1/send", "send orders", "process orders", f"publish {event}", f"process {event}"]
    path = [spans.one(name) for name in names]
    assert {trace_id(span) for span in path} == {TRACE}
    assert [parent_id(span) for span in path] == [SPAN, *(span_id(span) for span in path[:-1])]
    assert handled == [TraceContext(TRACE, span_id(path[-1]), 1)]


def test_without_opentelemetry_in_the_application_it_is_not_imported() -> None:
    program = """
import asyncio, sys
from postroom import NewMessage, open_mailbox

async def main():
    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b""))
    print([name for name in sys.modules if name.startswith("opentelemetry")])

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_spans_go_to_the_provider_of_an_application_that_uses_opentelemetry() -> None:
    program = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from postroom import NewMessage, open_mailbox

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)

async def main():
    async with open_mailbox("memory:") as mailbox:
        with trace.get_tracer("app").start_as_current_span("checkout"):
            await mailbox.send_message(NewMessage(topic="orders", payload=b""))

asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    send, checkout = (json.loads(each + "}") for each in done.stdout.strip().removesuffix("}").split("\n}\n"))
    assert (send["name"], checkout["name"]) == ("send orders", "checkout")
    assert send["parent_id"] == checkout["context"]["span_id"]


async def test_requests_of_monitoring_leave_no_spans() -> None:
    with capture_spans() as spans:
        async with (
            open_mailbox("memory:") as mailbox,
            served(mailbox, "http") as url,
            aiohttp.ClientSession(url, headers={"traceparent": TRACEPARENT}) as session,
        ):
            for path in ("/healthz", "/readyz", "/metrics"):
                async with session.get(path) as answer:
                    assert answer.status == 200
    assert spans.names() == []


def test_opentelemetrys_environment_names_the_collector_or_turns_tracing_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_recording() -> bool:
        # The application's own provider would be taken, and this process has imported OpenTelemetry.
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
        with export_traces(None):
            return not isinstance(tracer(), NullTracer)

    former = use_tracer(NullTracer())
    try:
        assert not is_recording()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        assert is_recording()
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        assert not is_recording()
        monkeypatch.delenv("OTEL_TRACES_EXPORTER")
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        assert not is_recording()
    finally:
        use_tracer(former)


class Envelopes(Transport):
    """Collect what the SDK of Sentry would send."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.events += filter(None, (each.get_event() for each in envelope.items))


async def test_sentry_gets_the_errors_of_handlers_each_with_its_message() -> None:
    worker, transport = Worker(middlewares=[sentry]), Envelopes()

    @worker.consumer("orders", concurrency=3, retry=Retry(attempts=1))
    async def confirm(message: ReceivedMessage) -> None:
        sentry_sdk.set_tag("customer", message.payload.decode())
        await asyncio.sleep(0)
        match message.payload:
            case b"reject":
                raise Reject("no account")
            case b"later":
                raise RetryLater("1h")
            case b"fail":
                raise LookupError("no such customer")

    @worker.consumer("reports", retry=Retry(attempts=1))
    def report(numbers: list[int]) -> None:
        sentry_sdk.set_tag("thread", threading.current_thread().name)
        raise ZeroDivisionError

    options: Any = {"include_local_variables": False, "default_integrations": False}
    sentry_sdk.init("http://key@127.0.0.1/1", transport=transport, **options)
    try:
        async with open_mailbox("memory:") as mailbox:
            for payload in (b"reject", b"later", b"fail", b"fine"):
                sent = await mailbox.send_message(NewMessage("orders", payload, message_id=payload.decode()))
            for payload in (b"[1]", b"no numbers"):
                await mailbox.send_message(NewMessage("reports", payload))
            await worker.run(mailbox, once=True)
            assert (await mailbox.get_message(sent.message_id)).status == "acked"
    finally:
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(None)
    by_type = {event["exception"]["values"][-1]["type"]: event for event in transport.events}
    assert sorted(by_type) == ["DecodeError", "LookupError", "ZeroDivisionError"]
    event = by_type["LookupError"]
    assert event["tags"] == {"topic": "orders", "customer": "fail"}
    assert event["transaction"] == "process orders"
    assert event["contexts"]["message"] == {"id": "fail", "attempt": 1}
    frames = event["exception"]["values"][-1]["stacktrace"]["frames"]
    assert frames[-1]["function"] == "confirm"
    assert not any("vars" in frame for frame in frames)
    assert by_type["ZeroDivisionError"]["tags"]["thread"] != threading.current_thread().name
