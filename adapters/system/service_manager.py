"""Messages to the service manager that started this process (sd_notify(3))."""

import asyncio
import math
import os
import socket
import time
from collections.abc import Mapping

from postroom.application.telemetry import logger

WATCHDOG_SHARE = 3
"""Messages in the time after which systemd takes a silent process for hung."""


class ServiceManager:
    """The service manager, such as systemd; without one, messages go nowhere.

    Arguments:
        environment: has the address of its socket, and how often it wants to hear from a healthy process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = environment.get("WATCHDOG_USEC", "") if own else ""
        self._watchdog_us = int(interval) if interval.isdecimal() else 0

    def ready(self) -> None:
        """Say that the command has started, or has reloaded."""
        self._notify("READY=1")

    def reloading(self) -> None:
        """Say that a reload begins."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1_000}")

    def stopping(self) -> None:
        """Say that the command ends."""
        self._notify("STOPPING=1")

    async def watch(self) -> None:
        """Say that the event loop is healthy, as often as the service manager asks, until cancelled."""
        pause = self._watchdog_us / 1_000_000 / WATCHDOG_SHARE or math.inf
        while self._address and pause < math.inf:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(pause)

    def _notify(self, message: str) -> None:
        if not self._address:
            return
        # A name that begins with @ is in Linux's abstract namespace.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError as error:  # the command continues; a service manager without notifications restarts it
            logger().retry("service_manager.unreachable", error=str(error))
