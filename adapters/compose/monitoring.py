"""Wiring of the metrics and the health of long-running commands."""

import asyncio
from contextlib import AbstractContextManager

from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Monitor


@explain_missing_extra("serve")
def serve_monitor(monitor: Monitor, port: int) -> AbstractContextManager[str]:
    """Serve a monitor from the running event loop at a loopback port; see `prometheus.server`.

    Raises: MissingExtra without `prometheus_client`; in the context, Unavailable if the port is in use.
    """
    from postroom.adapters.prometheus import server

    return server.serve_monitor(monitor, asyncio.get_running_loop(), port)
