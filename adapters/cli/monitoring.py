"""`--metrics-port` of long-running commands: metrics and health over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.application.monitor import Monitor

MetricsPort = Annotated[
    int | None,
    Option(
        "--metrics-port",
        metavar="PORT",
        min=0,
        max=65_535,
        help="Serve /metrics, /healthz and /readyz at 127.0.0.1:PORT.",
    ),
]


@contextmanager
def monitoring(session: Session, port: int | None, monitor: Monitor) -> Iterator[None]:
    """Serve the metrics and the health of a command while the context lasts, if a port is given.

    Raises: MissingExtra without `prometheus_client`, Unavailable when the port can't be bound.
    """
    if port is None:
        yield
        return
    from postroom.adapters.compose.monitoring import serve_monitor

    with serve_monitor(monitor, port) as url:
        session.out.note(f"Metrics at {url}/metrics.")
        yield
