"""Traces, metrics, memory protection and service manager of a process."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec

from postroom.adapters.system.host import ServiceManager
from postroom.application.extras import MissingExtra, explain_missing_extra
from postroom.application.metrics import Monitor
from postroom.application.telemetry import logger
from postroom.application.tracing import NullTracer, tracer, use_tracer

__all__ = [
    "ServiceManager",
    "TracingSettings",
    "export_traces",
    "protect_memory",
    "serve_monitor",
    "trace_if_used",
]


class TracingSettings(msgspec.Struct, frozen=True):
    """Settings of `[tracing]`.

    Arguments:
        otlp_endpoint: base URL of a collector that accepts OTLP over HTTP; None takes the one of
            OpenTelemetry's environment variables, if any.
    """

    otlp_endpoint: str | None = None


ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables of OpenTelemetry that name a collector."""


def trace_if_used() -> None:
    """Record spans with OpenTelemetry if this application has imported it; else its import costs nothing."""
    if "opentelemetry.trace" in sys.modules and isinstance(tracer(), NullTracer):
        from postroom.adapters.otel.tracer import OtelTracer

        use_tracer(OtelTracer())


@contextmanager
def export_traces(endpoint: str | None) -> Iterator[None]:
    """Export the spans of this process for as long as the context lasts, if a collector is configured.

    Arguments:
        endpoint: base URL of the collector; None takes the one of OpenTelemetry's environment variables.

    Raises: MissingExtra when an endpoint is given and the extra `otel` is not installed.
    """
    trace_if_used()
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    is_asked = endpoint is not None or any(os.environ.get(name) for name in ENDPOINTS)
    if is_off or not is_asked or not isinstance(tracer(), NullTracer):
        yield
        return
    try:
        with explain_missing_extra("otel"):
            from postroom.adapters.otel.export import exporting_tracer
    except MissingExtra as error:
        if endpoint is not None:
            raise
        logger().warning("tracing.unavailable", error=str(error))  # other programs may use these variables
        yield
        return
    with exporting_tracer(endpoint) as exporting:
        former = use_tracer(exporting)
        try:
            yield
        finally:
            use_tracer(former)


@explain_missing_extra("serve")
def serve_monitor(monitor: Monitor, port: int) -> AbstractContextManager[str]:
    """Serve a monitor from the running event loop at a loopback port; see `prometheus.server`.

    Raises: MissingExtra without `prometheus_client`; in the context, Unavailable if the port is in use.
    """
    from postroom.adapters.prometheus import server

    return server.serve_monitor(monitor, asyncio.get_running_loop(), port)


def protect_memory() -> list[str]:
    """Keep the memory of this process off every disk; see `system.host`.

    Returns: a sentence for each protection that the system does not permit.
    """
    from postroom.adapters.system import host

    return host.protect_memory()
