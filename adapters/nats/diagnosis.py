"""Checks of a NATS server."""

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from nats.aio.client import Client
from nats.errors import Error

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.diagnosis import Finding, clock_finding

MIN_VERSION = (2, 10)


def check_nats(settings: NatsSettings, seconds: float) -> Iterator[Finding]:
    """Find whether NATS can be reached, has JetStream, and what its clock says.

    Arguments:
        seconds: deadline of each request.
    """
    yield from asyncio.run(_check(settings, seconds))


async def _check(settings: NatsSettings, seconds: float) -> list[Finding]:
    async with connect(settings, "postroom doctor") as client:
        server_version = client.connected_server_version
        text = (
            f"{settings.shown_url}: NATS {server_version.major}.{server_version.minor}.{server_version.patch}"
        )
        if (server_version.major, server_version.minor) < MIN_VERSION:
            findings = [Finding("nats", "failure", text, "Use NATS 2.10 or newer.")]
        else:
            findings = [Finding("nats", "ok", text)]
        try:
            account = await _request(client, "$JS.API.INFO", seconds)
        except (Error, TimeoutError):
            account = {}
        if "streams" not in account:
            advice = "Start the server with -js, and enable JetStream for the account."
            return [*findings, Finding("jetstream", "failure", "it is not enabled", advice)]
        advice = "Set sync_interval: always in its jetstream section; clients can't see whether it is."
        findings.append(Finding("jetstream", "ok", f"{account['streams']:,} streams", advice))
        findings += await _check_clock(client, seconds)
        return findings


async def _check_clock(client: Client, seconds: float) -> list[Finding]:
    """Return the difference between the server's clock and ours; nothing if no stream reports a time."""
    names = (await _request(client, "$JS.API.STREAM.NAMES", seconds)).get("streams")
    if not names:
        return []
    before = time.time_ns() // 1_000
    at = (await _request(client, f"$JS.API.STREAM.INFO.{names[0]}", seconds)).get("ts")
    after = time.time_ns() // 1_000
    if not isinstance(at, str):  # before NATS 2.10.4
        return []
    theirs = datetime.fromisoformat(at[:26].rstrip("Z") + "+00:00")  # of nanoseconds, Python reads µs
    return [clock_finding("nats clock", before, int(theirs.timestamp() * 1_000_000), after)]


async def _request(client: Client, subject: str, seconds: float) -> dict[str, Any]:
    answer = await client.request(subject, b"", timeout=seconds)
    content: dict[str, Any] = json.loads(answer.data)
    return content
