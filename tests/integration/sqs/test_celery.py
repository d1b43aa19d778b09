"""A Celery worker with its SQS transport on a mailbox: retries, delays, and a kill."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.http import PostroomServer
from tests.support.sqs import sqs_client
from tests.support.waiting import SECONDS, wait_until

COUNT = 20
TASKS = """
import os, time
from pathlib import Path
from celery import Celery

FOLDER = Path(__file__).parent
app = Celery("tasks", broker=os.environ["BROKER"])
app.conf.update(
    broker_transport_options={
        "region": "us-east-1", "is_secure": False, "visibility_timeout": 5, "wait_time_seconds": 1,
        "polling_interval": 0.05,
    },
    task_acks_late=True, worker_prefetch_multiplier=1, worker_enable_remote_control=False,
    worker_send_task_events=False, task_ignore_result=True, broker_connection_retry_on_startup=True,
)

@app.task(bind=True, max_retries=3)
def handle(self, name):
    (FOLDER / f"{name}.{self.request.retries}").write_text(str(time.time()))
    if name == "fails-once" and not self.request.retries:
        raise self.retry(countdown=1)
    if name == "slow":
        time.sleep(3)
"""


@contextmanager
def worker(folder: Path, environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker with one process of its own."""
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-c", "1", "-P", "solo", "-l", "info"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)


@pytest.mark.extended
def test_a_celery_worker_that_is_killed_loses_no_task(tmp_path: Path) -> None:
    """Each task runs, also one that a killed worker had begun, and none before its countdown or its retry."""
    (tmp_path / "tasks.py").write_text(TASKS)
    with PostroomServer(tmp_path / "server", sqs="127.0.0.1:0", console=False) as server:
        port = server.addresses[1].rpartition(":")[2]
        environment = {**os.environ, "BROKER": f"sqs://any:any@127.0.0.1:{port}//"}
        send = (
            "import time\n"
            "from tasks import FOLDER, handle\n"
            "(FOLDER / 'sent').write_text(str(time.time()))\n"
            "handle.apply_async(['later'], countdown=2)\n"
            "handle.delay('fails-once')\n"
            "handle.delay('slow')\n"
            f"[handle.delay(f'task-{{i}}') for i in range({COUNT})]\n"
        )
        subprocess.run([sys.executable, "-c", send], cwd=tmp_path, env=environment, check=True, timeout=60)
        with worker(tmp_path, environment):
            wait_until(lambda: (tmp_path / "slow.0").exists(), 60)
        (tmp_path / "slow.0").unlink()
        expected = {
            "later.0",
            "fails-once.0",
            "fails-once.1",
            "slow.0",
            *(f"task-{i}.0" for i in range(COUNT)),
        }
        with worker(tmp_path, environment):
            wait_until(lambda: expected <= {each.name for each in tmp_path.iterdir()}, 60)
            client = sqs_client(server.addresses[1])
            queue = client.get_queue_url(QueueName="celery")["QueueUrl"]
            wait_until(lambda: is_empty(client, queue), 60)
        times = {name: float((tmp_path / name).read_text()) for name in (*expected, "sent")}
        assert times["later.0"] - times["sent"] >= 2
        assert times["fails-once.1"] - times["fails-once.0"] >= 1
        assert {each.name for each in tmp_path.glob("*.[0-9]")} == expected


def is_empty(client: Any, url: str) -> bool:
    """Return whether a queue has no messages, visible or not."""
    counts = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return all(value == "0" for name, value in counts.items() if name.startswith("Approximate"))
