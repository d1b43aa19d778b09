"""Tasks of Django in a mailbox: enqueued in transactions, run by a worker, and their results."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from postroom import NewMessage
from tests.support.django_site import backends, configure, databases, manage, migrate, run_tasks
from tests.support.waiting import wait_until

configure()

from postroom.django.framework import InvalidTask, TaskResultDoesNotExist  # noqa: E402
from tests.support.django_site import tasks  # noqa: E402 # its models need the settings
from tests.support.django_site.models import Order  # noqa: E402


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database with the tables of the site, which is never written to."""
    path = tmp_path_factory.mktemp("django") / "site.db"
    with databases(default=str(path)):
        migrate()
    return path


@pytest.fixture
def site(tmp_path: Path, migrated_file: Path) -> Iterator[Any]:
    """The backend of a site on SQLite, while its worker runs elsewhere or not."""
    path = tmp_path / "site.db"
    path.write_bytes(migrated_file.read_bytes())
    with databases(default=str(path)), backends(default={"QUEUES": ["default", "mail"]}) as backend:
        yield backend


def test_a_task_runs_and_its_result_is_read(site: Any) -> None:
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.args, result.kwargs) == ("READY", [1], {"b": 2})
    assert tasks.add.get_result(result.id) == result
    assert run_tasks(site) == (1, 0)
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", 3, 1)
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert tasks.add.get_result(result.id) == result


@pytest.fixture(params=["sqlite", "postgresql"])
def any_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The backend of a site, on each database."""
    if request.param == "sqlite":
        yield request.getfixturevalue("site")
        return
    url = request.getfixturevalue("create_database")(request.getfixturevalue("migrated_database"))
    options = {"store": tmp_path / "store.db"}
    with databases(default=url), backends(default={"OPTIONS": options}) as backend:
        yield backend


@pytest.fixture(scope="session")
def migrated_database(create_shared_database: Any) -> str:
    """A PostgreSQL database with the tables of the site, which is never written to."""
    url: str = create_shared_database(None)
    with databases(default=url):
        migrate()
    return url


def names() -> list[str]:
    return sorted(Order.objects.values_list("name", flat=True))


def test_only_what_is_committed_is_run_and_once(any_site: Any) -> None:
    with suppress(ZeroDivisionError), transaction.atomic():
        rolled_back = tasks.place.enqueue("rolled back")
        assert tasks.place.get_result(rolled_back.id).status == "READY"
        raise ZeroDivisionError
    with transaction.atomic():
        Order.objects.create(name="order")
        tasks.place.enqueue("committed")
        with suppress(ZeroDivisionError), transaction.atomic():
            tasks.place.enqueue("rolled back to a savepoint")
            raise ZeroDivisionError
        with transaction.atomic():
            tasks.place.enqueue("in a savepoint")
    tasks.place.enqueue("without a transaction")
    assert run_tasks(any_site) == (3, 0)
    assert names() == ["committed", "in a savepoint", "order", "without a transaction"]
    with pytest.raises(TaskResultDoesNotExist):
        tasks.place.get_result(rolled_back.id)


async def test_asynchronous_code_enqueues_and_reads(site: Any) -> None:
    result = await tasks.aplace.aenqueue("later")
    assert await asyncio.to_thread(run_tasks, site) == (1, 0)
    await result.arefresh()
    assert result.return_value == "later"
    assert (await tasks.aplace.aget_result(result.id)).status == "SUCCESSFUL"
    assert [order.text async for order in Order.objects.all()] == ["async"]


def test_tasks_enqueue_others(site: Any) -> None:
    tasks.place_many.enqueue(["a", "b"])
    assert run_tasks(site, concurrency=2) == (3, 0)
    assert names() == ["a", "b"]


def test_urgent_tasks_run_first(site: Any) -> None:
    for priority in (-100, 0, 100, 50):
        tasks.log.using(priority=priority).enqueue(priority)
    assert run_tasks(site) == (4, 0)
    assert [order.text for order in Order.objects.order_by("pk")] == ["100", "50", "0", "-100"]


def test_a_task_runs_after_its_time(site: Any) -> None:
    past, future = timezone.now() - timedelta(hours=1), timezone.now() + timedelta(hours=1)
    tasks.place.using(run_after=past).enqueue("past")
    later = tasks.place.using(run_after=future, queue_name="mail", priority=7).enqueue("future")
    assert run_tasks(site) == (1, 0)
    assert names() == ["past"]
    assert tasks.place.get_result(later.id) == later
    assert (later.status, later.task.run_after, later.task.priority) == ("READY", future, 7)


def test_the_delay_of_a_task_counts_from_its_commit_not_from_its_send(site: Any) -> None:
    due = timezone.now() + timedelta(milliseconds=100)
    tasks.place.using(run_after=due).enqueue("soon")
    wait_until(lambda: timezone.now() > due)  # while no owner runs
    assert run_tasks(site) == (1, 0)


def test_a_task_that_fails_is_retried_and_then_has_its_error(site: Any) -> None:
    with site.connect() as mailbox:
        mailbox.set_topic_policy("default", {"max_attempts": 2, "backoff_base_ms": 1, "backoff_max_ms": 1})
    result = tasks.decline.enqueue("ada")
    wait_until(lambda: run_tasks(site) and tasks.decline.get_result(result.id).is_finished)
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 2)
    (error,) = result.errors
    assert error.exception_class is tasks.Declined
    assert "in decline" in error.traceback
    assert error.traceback.startswith("Traceback (most recent call last)")
    with pytest.raises(ValueError, match="failed"):
        result.return_value  # noqa: B018 # it raises


@pytest.mark.parametrize(
    ("enqueue", "error"),
    [
        (lambda: tasks.reject.enqueue("no such customer"), "no such customer"),
        (lambda: tasks.unserializable.enqueue(), "object"),
        (lambda: tasks.place.enqueue(), "argument"),
    ],
)
def test_a_task_that_is_rejected_or_returns_no_json_fails(
    site: Any, enqueue: Callable[[], Any], error: str
) -> None:
    with site.connect() as mailbox:
        mailbox.set_topic_policy("default", {"max_attempts": 1})
    result = enqueue()
    assert run_tasks(site) == (0, 1)
    result.refresh()
    assert result.status == "FAILED"
    assert error in result.errors[0].traceback
    assert issubclass(result.errors[0].exception_class, Exception)


def test_a_task_knows_its_attempt(site: Any) -> None:
    with site.connect() as mailbox:
        mailbox.set_topic_policy("default", {"backoff_base_ms": 1, "backoff_max_ms": 1})
    result = tasks.attempts.enqueue(1)
    wait_until(lambda: run_tasks(site) and tasks.attempts.get_result(result.id).is_finished)
    result.refresh()
    assert result.return_value == [2, result.id, 2]
    assert len(result.worker_ids) == 2


def test_a_task_that_asks_to_be_retried_later_is_ready(site: Any) -> None:
    result = tasks.ask_again.enqueue()
    assert run_tasks(site) == (0, 0)
    result.refresh()
    assert (result.status, result.attempts) == ("READY", 1)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{}", "missing required field `task`"),
        (b"[" * 100_000, "not the call of a task"),
        (b'{"task": "antigravity.fly"}', "in no installed app"),
        (b'{"task": "fly"}', "in no installed app"),
        (b'{"task": ""}', "in no installed app"),
        (b'{"task": "os.system", "args": ["true"]}', "is not a task"),
        (b'{"task": "tests.support.django_site.tasks.not_a_task"}', "is not a task"),
        (b'{"task": "tests.support.django_site.tasks.task"}', "is not a task"),
        (b'{"task": "tests.support.django_site.broken.any"}', "can't be imported: ZeroDivisionError"),
        (b'{"task": "tests.support.django_site.missing.any"}', "can't be imported"),
        (b'{"task": "tests.support.django_site.tasks.add", "priority": 101}', "priority"),
        (b'{"task": "tests.support.django_site.tasks.add", "run_after": "soon"}', "soon"),
        (b'{"task": "tests.support.django_site.tasks.add", "run_after": "2026-01-01T00:00"}', "aware"),
    ],
)
def test_a_message_that_calls_no_task_is_a_dead_letter_with_the_reason(
    site: Any, payload: bytes, reason: str
) -> None:
    with site.connect() as mailbox:
        sent = mailbox.send_message(NewMessage("default", payload))
    assert run_tasks(site) == (0, 1)
    assert "antigravity" not in sys.modules
    with site.connect() as mailbox:
        (letter,) = mailbox.list_dead_letters().items
    assert reason in (letter.last_error or "")
    with pytest.raises(InvalidTask):
        site.get_result(sent.message_id)


def test_what_a_worker_could_not_run_is_refused_at_once(site: Any) -> None:
    for value in (object(), float("nan"), b"\xff", {1: {2: object()}}):
        with pytest.raises((TypeError, ValueError)):
            tasks.echo.enqueue(value)
    with pytest.raises(InvalidTask, match="is not a task"):
        tasks.renamed.enqueue()
    with pytest.raises(InvalidTask, match="not valid"):
        tasks.add.using(queue_name="other")
    with pytest.raises(InvalidTask, match="priority"):
        tasks.add.using(priority=101)
    assert run_tasks(site) == (0, 0)


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.extended)])
def test_no_task_is_lost_when_workers_are_killed(any_site: Any, tmp_path: Path, kills: int) -> None:
    expected = {f"order {n}" for n in range(100 * kills)}
    with transaction.atomic():
        results = [tasks.place.enqueue(name) for name in sorted(expected)]
    worker = manage(any_site, tmp_path, "postroom_worker", "--visibility=1s", "--concurrency=4")
    for kill in range(1, kills + 1):
        worker.start(lambda: len(set(names())) > 50 * kill)  # noqa: B023 # it is called before the next one
        worker.kill()
    worker.start(lambda: set(names()) == expected)
    worker.stop()
    assert (
        len(names()) < len(expected) + 4 * 2 * kills
    )  # those in progress, and those settled and not yet acked
    for result in results[:: 20 * kills]:
        result.refresh()
        assert result.status == "SUCCESSFUL"
