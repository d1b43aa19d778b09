"""Spans that long-running commands export to a collector, by OTLP over HTTP."""

import asyncio
import signal
import socket
import subprocess
from pathlib import Path

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom
from tests.e2e.test_logs import SECRETS, read_until, request_over


def start(postroom: Postroom, endpoint: str) -> "tuple[subprocess.Popen[bytes], Path]":
    """Start a server that exports its spans to `endpoint`."""
    (postroom.folder / "postroom.toml").write_text(f'[tracing]\notlp_endpoint = "{endpoint}"\n')
    address = postroom.folder / "http"
    process = postroom.start("serve", "--dev", "--http", f"unix:{address}")
    read_until(b"Serving", process)
    return process, address


def stop(process: "subprocess.Popen[bytes]") -> bytes:
    """End a server, and return what it logged."""
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, logged
    return logged


async def test_a_server_exports_its_spans_and_flushes_them_when_it_is_terminated(postroom: Postroom) -> None:
    spans: dict[str, Span] = {}
    services: set[str] = set()

    async def receive(request: web.Request) -> web.Response:
        body = await request.read()
        assert not [secret for secret in SECRETS if secret.encode() in body]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            services.add(attributes["service.name"])
            spans.update({span.name: span for scope in resource.scope_spans for span in scope.spans})
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    collector = web.Application()
    collector.router.add_post("/v1/traces", receive)
    runner = web.AppRunner(collector)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    process, address = await asyncio.to_thread(start, postroom, f"http://{host}:{port}")
    try:
        assert await asyncio.to_thread(request_over, address) == 200
        await asyncio.to_thread(stop, process)
    finally:
        process.kill()
        await runner.cleanup()
    request, send = spans["POST /v1/send"], spans["send orders"]
    assert services == {"postroom"}
    assert (send.trace_id, send.parent_span_id) == (request.trace_id, request.span_id)


def test_a_collector_that_never_answers_neither_fails_calls_nor_keeps_a_server_from_ending(
    postroom: Postroom,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        process, address = start(postroom, f"http://127.0.0.1:{collector.getsockname()[1]}")
        try:
            assert request_over(address) == 200
            assert b"tracing.spans_dropped" in stop(process)
        finally:
            process.kill()


def test_an_endpoint_that_is_no_url_stops_the_start(postroom: Postroom) -> None:
    done = postroom("serve", "--dev", POSTROOM_TRACING__OTLP_ENDPOINT="collector:4318")
    assert done.code == 2
    assert "otlp_endpoint is 'collector:4318'" in done.err
