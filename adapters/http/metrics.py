"""Metrics as OpenMetrics text, for whatever scrapes them."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from postroom.application.telemetry import Metric
from postroom.domain.errors import Unavailable

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@asynccontextmanager
async def serve_metrics(
    measure: Callable[[], Iterable[Metric]], port: int, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Serve metrics at `/metrics` while the context lasts, and yield the URL.

    Arguments:
        measure: called for every request.
        port: 0 for any that is free.

    Raises: Unavailable when the port can't be had.
    """

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=render(measure()).encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise Unavailable(
                f"Metrics can't be served at {host}:{port}: {error.strerror}; choose another --metrics-port."
            ) from error
        yield f"http://{host}:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


def render(metrics: Iterable[Metric]) -> str:
    """Return metrics as OpenMetrics text."""
    lines = []
    for metric in metrics:
        lines += [f"# TYPE {metric.name} {metric.kind}", f"# HELP {metric.name} {_escaped(metric.help)}"]
        suffix = "_total" if metric.kind == "counter" else ""
        for labels, value in metric.samples:
            written = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{suffix}{'{' + written + '}' if written else ''} {value}")
    return "\n".join((*lines, "# EOF", ""))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
