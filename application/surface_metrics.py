"""Metrics of network surfaces, beside those of the mailbox that they serve (svc-mailbox I-10)."""

import asyncio
from collections import Counter
from collections.abc import Collection

from postroom.application.metrics import Measure, Metric, gauge, merge, rejected_metric
from postroom.application.monitor import MAILBOX_SECONDS
from postroom.domain.errors import PostroomError
from postroom.domain.policy import SECOND_MS


class SurfaceMetrics:
    """Requests of all surfaces of a process, and the metrics of the mailbox.

    Labels are bounded: methods, routes, statuses and codes are fixed.

    Arguments:
        measure: returns the metrics of the mailbox, wherever its owner is; None for none.
        cap_cache_ttl_ms: how long a verified token is not verified again; None without capabilities.
        measure_outboxes: returns the metrics of messages that transactions recorded; they don't depend on the
            owner of the mailbox, which may be down.
    """

    def __init__(
        self,
        measure: Measure | None = None,
        cap_cache_ttl_ms: int | None = None,
        measure_outboxes: Measure | None = None,
    ) -> None:
        self.measure = measure
        self._measure_outboxes = measure_outboxes
        self._cap_cache_ttl_ms = cap_cache_ttl_ms
        self._http: Counter[tuple[str, str, int]] = Counter()
        self._grpc: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[str] = Counter()

    def answered_http(self, method: str, route: str, status: int) -> None:
        """Count an answered HTTP request; the route of an unknown path is `other`."""
        name = method if method in ("GET", "HEAD", "POST", "PUT") else "other"
        self._http[name, route, status] += 1

    def answered_grpc(self, method: str, status: str) -> None:
        """Count a call over gRPC that ended, with the name of its status."""
        self._grpc[method, status] += 1

    def count_answers(self, methods: Collection[str]) -> int:
        """Return the number of calls over gRPC of these methods that succeeded."""
        return sum(self._grpc[method, "OK"] for method in methods)

    def refused(self, error: PostroomError) -> None:
        """Count a refused request, unless the owner of the mailbox has counted it."""
        if not error.is_counted:
            self._rejected[error.code] += 1

    async def collect(self) -> list[Metric]:
        """Return all metrics; while the mailbox can't be used, those of the surfaces."""
        metrics: list[Metric] = []
        is_up = True
        if self.measure is not None:
            try:
                async with asyncio.timeout(MAILBOX_SECONDS):
                    metrics += await self.measure()
            except (PostroomError, TimeoutError):
                is_up = False
        if self._measure_outboxes is not None:
            metrics += await self._measure_outboxes()
        if self._cap_cache_ttl_ms is not None:
            ttl = self._cap_cache_ttl_ms / SECOND_MS
            metrics.append(
                gauge("postroom_cap_cache_ttl_seconds", "Time until a revocation takes effect, at most.", ttl)
            )
        metrics += (
            gauge("postroom_mailbox_up", "1 if the mailbox can be used.", is_up),
            Metric(
                "postroom_http_requests",
                "counter",
                "Requests over HTTP by method, route and status.",
                [
                    ({"method": method, "route": route, "status": str(status)}, number)
                    for (method, route, status), number in sorted(self._http.items())
                ],
            ),
            Metric(
                "postroom_grpc_requests",
                "counter",
                "Calls over gRPC by method and status.",
                [
                    ({"method": method, "status": status}, number)
                    for (method, status), number in sorted(self._grpc.items())
                ],
            ),
            rejected_metric(self._rejected),
        )
        return merge(metrics)
