"""Metrics of connections to NATS."""

from collections.abc import Mapping

from nats.aio.client import Client

from postroom.application.metrics import Metric


def nats_metrics(clients: Mapping[str, Client]) -> list[Metric]:
    """Return the state of connections, by their purpose."""
    connected = [({"connection": name}, float(client.is_connected)) for name, client in clients.items()]
    reconnects = [
        ({"connection": name}, float(client.stats["reconnects"])) for name, client in clients.items()
    ]
    return [
        Metric("postroom_nats_connected", "gauge", "1 for a connection to NATS that works.", connected),
        Metric("postroom_nats_reconnects", "counter", "Connections to NATS that were replaced.", reconnects),
    ]
