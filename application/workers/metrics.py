"""Metrics of a worker."""

from collections.abc import Sequence

from postroom.application.metrics import Metric
from postroom.application.workers.consumer_run import ConsumerRun


def worker_metrics(runs: Sequence[ConsumerRun]) -> list[Metric]:
    """Return the metrics of the consumers of a worker, by the topics or patterns of their registration."""
    return [
        Metric(
            "postroom_worker_jobs",
            "counter",
            "Messages handled, by consumer and outcome.",
            [
                ({"consumer": run.topic, "outcome": outcome}, number)
                for run in runs
                for outcome, number in (("handled", run.handled), ("failed", run.failed))
            ],
        ),
        Metric(
            "postroom_worker_inflight",
            "gauge",
            "Messages in progress.",
            [({"consumer": run.topic}, run.in_progress) for run in runs],
        ),
        Metric(
            "postroom_worker_job_seconds",
            "histogram",
            "Duration of the calls of the handlers.",
            [({"consumer": run.topic}, run.seconds) for run in runs],
        ),
    ]
