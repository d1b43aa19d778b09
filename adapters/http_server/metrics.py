"""Metrics of the service (svc-mailbox I-10), in the text format of Prometheus."""

from collections.abc import Iterator, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from postroom.application.query_results import Backlog
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.policy import TopicPolicy

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class HttpMetrics:
    """Counters and histograms of requests, and the state of the mailbox at the time of a scrape.

    Labels are bounded: routes and codes are fixed, and a mailbox holds a limited number of topics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            "postroom_http_requests",
            "Requests by method, route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._requests = cache(requests.labels)
        self._rejected = Counter(
            "postroom_rejected", "Refused requests by code.", ["reason"], registry=self.registry
        )
        self.enqueue = self._histogram("enqueue", "Time until a send is durable.")
        self.dequeue = self._histogram("dequeue", "Time of a receive that does not wait.")
        self.ack = self._histogram("ack", "Time until an ack is durable.")
        self._mailbox = _MailboxCollector()
        self.registry.register(self._mailbox)

    def served(self, method: str, route: str, status: int) -> None:
        """Count a request that was answered."""
        name = method if method in ("GET", "HEAD", "POST", "PUT") else "other"
        self._requests(name, route, str(status)).inc()

    def rejected(self, code: str) -> None:
        """Count a request that was refused."""
        self._rejected.labels(code).inc()

    def scrape(self, backlog: Backlog, topics: Sequence[TopicSummary], default_policy: TopicPolicy) -> bytes:
        """Return all metrics as text.

        Arguments:
            topics: of the mailbox.
            default_policy: policy of topics that have none of their own.
        """
        self._mailbox.backlog, self._mailbox.topics = backlog, topics
        self._mailbox.default_policy = default_policy
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"postroom_{name}_seconds", text, buckets=BUCKETS, registry=self.registry)


class _MailboxCollector(Collector):
    """Collector of the state of the mailbox that was read for a scrape."""

    def __init__(self) -> None:
        self.backlog: Backlog | None = None
        self.topics: Sequence[TopicSummary] = ()
        self.default_policy = TopicPolicy()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of each shard, and the metrics of each topic."""
        shards = self.backlog.shards if self.backlog is not None else []
        for name, text, field in (
            ("queue_depth", "Messages ready or delayed.", ("ready", "delayed")),
            ("inflight", "Messages in flight.", ("in_flight",)),
            ("dead_letters", "Dead letters.", ("dead",)),
        ):
            family = GaugeMetricFamily(f"postroom_{name}", text, labels=["topic", "shard"])
            for each in shards:
                family.add_metric([each.topic, str(each.shard)], sum(getattr(each, name) for name in field))
            yield family
        saturation = GaugeMetricFamily(
            "postroom_saturation", "Unsettled messages per shard capacity, 0 to 1.", labels=["topic", "shard"]
        )
        policies = {topic.topic: topic.policy or self.default_policy for topic in self.topics}
        for each in shards:
            unsettled = each.ready + each.delayed + each.in_flight
            capacity = policies.get(each.topic, self.default_policy).shard_capacity
            saturation.add_metric([each.topic, str(each.shard)], unsettled / capacity)
        yield saturation
        if self.backlog is not None:
            profile = GaugeMetricFamily(
                "postroom_dlq_profile",
                "1 for the profile of the dead letters: durable, or ephemeral in memory.",
                labels=["dlq_profile"],
            )
            profile.add_metric([self.backlog.dlq_profile], 1)
            yield profile
        yield from self._topics()

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names of this registry are unique."""
        yield from ()

    def _topics(self) -> Iterator[Metric]:
        dead_letterings = CounterMetricFamily(
            "postroom_dlq", "Dead-letterings by topic and reason.", labels=["topic", "reason"]
        )
        paused = GaugeMetricFamily("postroom_topic_paused", "1 for a paused topic.", labels=["topic"])
        for topic in self.topics:
            for reason, number in topic.dead_letterings.items():
                dead_letterings.add_metric([topic.topic, reason], number)
            if topic.paused:
                paused.add_metric([topic.topic], 1)
        yield dead_letterings
        yield paused
