"""Tasks of Django in a mailbox: enqueued in transactions, run by a worker, and their results."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ObjectDoesNotExist
from django.core.management import CommandError, call_command
from django.db import IntegrityError, transaction
from django.test import Client
from django.utils import timezone

from postroom import NewMessage, Reject, Sent, SettingsChanges, open_mailbox
from tests.support.django_site import (
    BACKPORT,
    backends,
    configure,
    database_of,
    databases,
    manage,
    migrate,
    run_tasks,
)
from tests.support.surfaces import served
from tests.support.waiting import wait_until

configure()

from django.contrib.auth import get_user_model  # noqa: E402 # it needs the settings

from postroom.django.framework import (  # noqa: E402
    InvalidTask,
    InvalidTaskBackend,
    TaskResultDoesNotExist,
    task_enqueued,
    task_finished,
    task_started,
)
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


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """The logging of this process is restored after commands that configure it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level


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


def test_in_a_transaction_of_another_database_only_enqueueing_is_refused(
    site: Any, tmp_path: Path, migrated_file: Path
) -> None:
    own, other = tmp_path / "site.db", tmp_path / "tasks.db"
    other.write_bytes(migrated_file.read_bytes())
    options = {"database": "tasks", "store": str(tmp_path / "store.db")}
    with (
        databases(default=str(own), tasks=str(other)),
        backends(default={"OPTIONS": options}) as backend,
    ):
        with transaction.atomic(), pytest.raises(InvalidTask, match="'default' has"):
            tasks.add.enqueue(1)
        with transaction.atomic():
            transaction.on_commit(lambda: tasks.add.enqueue(1))
        with transaction.atomic(), transaction.atomic(using="tasks"):
            tasks.add.enqueue(2)
        assert run_tasks(backend) == (2, 0)


async def test_a_server_gives_the_tasks_of_a_database_that_its_settings_name(
    site: Any, tmp_path: Path
) -> None:
    database = str(tmp_path / "site.db")
    async with (
        open_mailbox(str(tmp_path / "store.db"), outboxes=[database]) as mailbox,
        served(mailbox, "http") as url,
    ):
        with backends(default={"OPTIONS": {"store": url}}) as remote:
            result = await tasks.add.aenqueue(1, 2)
            worker, log = manage(remote, tmp_path, "postroom_worker"), tmp_path / "postroom_worker.log"
            await asyncio.to_thread(worker.start, lambda: "state=SUCCESSFUL" in log.read_text())
            await asyncio.to_thread(worker.stop)
            await result.arefresh()
            assert (result.return_value, result.attempts) == (3, 1)


def test_signals_tell_of_tasks(site: Any) -> None:
    seen: list[Any] = []

    def note(signal: Any, task_result: Any, **_: Any) -> None:
        seen.append((task_result.id, str(task_result.status)))
        raise ZeroDivisionError  # it changes nothing

    signals = (task_enqueued, task_started, task_finished)
    for signal in signals:
        signal.connect(note)
    try:
        good, bad = tasks.add.enqueue(1), tasks.reject.enqueue("no")
        assert run_tasks(site) == (1, 1)
    finally:
        for signal in signals:
            signal.disconnect(note)
    expected = {good.id: ["READY", "RUNNING", "SUCCESSFUL"], bad.id: ["READY", "RUNNING", "FAILED"]}
    assert {id_: [status for each, status in seen if each == id_] for id_ in expected} == expected


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"OPTIONS": {"stor": "a.db"}}, "postroom.E001"),
    ({"OPTIONS": ["store"]}, "postroom.E001"),
    ({"OPTIONS": {"token": b"secret"}}, "postroom.E001"),
    ({"OPTIONS": {"store": ""}}, "postroom.E001"),
    ({"OPTIONS": {"store": "memory:"}}, "postroom.E001"),
    ({"OPTIONS": {"store": "ftp://127.0.0.1"}}, "postroom.E003"),
    ({"OPTIONS": {"database": "other"}}, "postroom.E001"),
    ({"OPTIONS": {"mailbox": "no name"}}, "postroom.E001"),
    ({"QUEUES": ["all of *"]}, "postroom.E001"),
    ({"QUEUES": [7]}, "postroom.E001"),
    ({"OPTIONS": {"database": "memory"}}, "postroom.E003"),
    ({"OPTIONS": {"database": "dummy"}}, "postroom.E003"),
    ({"OPTIONS": {"database": "deferred"}}, "postroom.W002"),
    ({}, "postroom.W001"),
]


@pytest.mark.parametrize(("settings", "id_"), SETTINGS)
def test_the_system_checks_find_wrong_settings(tmp_path: Path, settings: dict[str, Any], id_: str) -> None:
    path = str(tmp_path / "site.db")
    others = {
        "memory": database_of(":memory:"),
        "dummy": {"ENGINE": "django.db.backends.dummy"},
        "deferred": database_of(path, OPTIONS={}, ATOMIC_REQUESTS=True),
    }
    with databases(default=path, **others), backends(default=settings) as backend:
        assert [each.id for each in run_checks() if str(each.id).startswith("postroom.")] == [id_]
        if id_ == "postroom.E001":
            with pytest.raises(InvalidTaskBackend, match="default"):
                tasks.add.enqueue(1)
            with pytest.raises(InvalidTaskBackend, match="default"):
                backend.get_result("1")


def test_the_checks_of_databases_warn_of_missing_tables_and_of_the_mailbox(tmp_path: Path) -> None:
    def ids() -> list[str | None]:
        return [each.id for each in run_checks(databases=["default"]) if str(each.id).startswith("postroom.")]

    path = str(tmp_path / "site.db")
    with databases(default=path), backends(default={}) as backend:
        assert ids() == ["postroom.W003", "postroom.W004"]
        migrate()
        assert ids() == ["postroom.W004"]
        assert not (tmp_path / "postroom.db").exists()
        with backend.connect():
            assert ids() == []
    for store in ("http://127.0.0.1:1", "postgresql://nobody@127.0.0.1:1/none"):
        with databases(default=path), backends(default={"OPTIONS": {"store": store}}):
            assert ids() == ["postroom.W004"]


def test_tasks_are_enqueued_in_the_database_in_memory_that_tests_of_a_site_have() -> None:
    with databases(default="file:memorydb_default?mode=memory&cache=shared"), backends(default={}):
        migrate()
        assert not [
            each for each in run_checks(databases=["default"]) if str(each.id).startswith("postroom.")
        ]
        assert tasks.add.get_result(tasks.add.enqueue(1).id).status == "READY"


@pytest.mark.usefixtures("kept_logging")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend=other"], "other"),
        (["--backend=wrong"], "OPTIONS has no 'stor'"),
        (["--backend=immediate"], "not postroom.django.PostroomBackend"),
        (["--queue=male"], "did you mean mail"),
        (["--concurrency=0"], "concurrency"),
        (["--visibility=1"], "visibility"),
        (["--stop-within=soon"], "soon"),
        (["--config=missing.toml"], "missing.toml"),
    ],
)
def test_a_command_refuses_what_it_can_not_use(site: Any, arguments: list[str], reason: str) -> None:
    module = "django_tasks" if BACKPORT else "django.tasks"
    immediate = {"BACKEND": f"{module}.backends.immediate.ImmediateBackend"}
    with (
        backends(
            default={"QUEUES": ["default", "mail"]}, immediate=immediate, wrong={"OPTIONS": {"stor": ""}}
        ),
        pytest.raises(CommandError, match=reason),
    ):
        call_command("postroom_worker", *arguments, once=True, skip_checks=True)


def test_the_admin_lists_waiting_tasks_and_links_to_the_console(site: Any) -> None:
    url = "http://127.0.0.1:8080/console"
    with backends(default={"OPTIONS": {"console": url}}):
        result = tasks.add.enqueue(1)
        client = Client()
        assert client.get("/admin/postroom/outboxmessage/").status_code == HTTPStatus.FOUND  # to the login
        client.force_login(get_user_model().objects.create_superuser("root"))
        page = client.get("/admin/postroom/outboxmessage/").content.decode()
        assert result.id in page
        assert f'href="{url}"' in page
        assert "Console of main@local" in page
        row = client.get("/admin/postroom/outboxmessage/1/change/").content.decode()
        assert result.id in row
        assert "Delete" not in row
        assert client.post("/admin/postroom/outboxmessage/1/delete/").status_code == HTTPStatus.FORBIDDEN


def test_one_process_runs_the_owner_a_worker_and_the_console(site: Any, tmp_path: Path) -> None:
    log = tmp_path / "postroom_up.log"
    result = tasks.aplace.enqueue("by up")
    up = manage(site, tmp_path, "postroom_up", "--http=127.0.0.1:0")
    up.start(
        lambda: "/console/start?code=" in log.read_text() and tasks.aplace.get_result(result.id).is_finished
    )
    assert "main@local of" in log.read_text()
    assert "runs: worker of TASKS['default'], console." in log.read_text()
    up.stop()
    assert log.read_text().rstrip().endswith("Stopping.")
    assert names() == ["by up"]


def test_tasks_enqueue_others(site: Any) -> None:
    tasks.place_many.enqueue(["a", "b"])
    assert run_tasks(site, concurrency=2) == (3, 0)
    assert names() == ["a", "b"]


def test_urgent_tasks_run_first(site: Any) -> None:
    for priority in (-100, 0, 100, 50):
        tasks.log.using(priority=priority).enqueue(priority)
    assert run_tasks(site) == (4, 0)
    assert [order.text for order in Order.objects.order_by("pk")] == ["100", "50", "0", "-100"]


def test_a_section_of_the_settings_without_priorities_wins_over_a_worker(site: Any) -> None:
    with site.connect() as mailbox:
        mailbox.set_settings(SettingsChanges(topics={"def*": {"priorities": False}}))
    for priority in (-100, 100):
        tasks.log.using(priority=priority).enqueue(priority)
    assert run_tasks(site) == (2, 0)
    assert [order.text for order in Order.objects.order_by("pk")] == ["-100", "100"]


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


def test_a_task_that_fails_for_good_has_the_class_and_the_text_of_its_error(site: Any) -> None:
    with site.connect() as mailbox:
        mailbox.set_topic_policy("default", {"max_attempts": 1})
    cases = [
        (tasks.reject.enqueue("no such customer"), "no such customer", Reject),
        (tasks.unserializable.enqueue(), "object", TypeError),
        (tasks.place.enqueue(), "argument", TypeError),
        (tasks.pretend.enqueue(), "antigravity", ValueError),
        (tasks.decline.enqueue("ada"), "was declined", tasks.Declined),
        (tasks.find.enqueue("nobody"), "models.Order.DoesNotExist", ObjectDoesNotExist),
        (
            tasks.place_twice.enqueue(),
            "UNIQUE",
            IntegrityError,
        ),  # caused by one of sqlite3 with the same name
    ]
    assert run_tasks(site) == (0, len(cases))
    for result, text, kind in cases:
        result.refresh()
        assert result.status == "FAILED"
        assert text in result.errors[0].traceback
        assert result.errors[0].exception_class is kind


def test_a_task_that_leaves_a_transaction_open_fails_and_the_next_are_not_within_it(any_site: Any) -> None:
    with any_site.connect() as mailbox:
        mailbox.set_topic_policy("default", {"max_attempts": 1})
    returned, raised = tasks.leave_open.enqueue("returned"), tasks.leave_open.enqueue("raised", "no")
    after = [tasks.place.enqueue("after"), tasks.aplace.enqueue("after, async")]
    assert run_tasks(any_site) == (2, 2)
    assert names() == ["after", "after, async"]
    assert "database default open" in any_site.get_result(returned.id).errors[0].traceback
    assert any_site.get_result(raised.id).errors[0].exception_class is tasks.Declined
    assert {any_site.get_result(each.id).status for each in after} == {"SUCCESSFUL"}


def test_what_is_no_id_of_a_task_has_no_result(any_site: Any) -> None:
    for id_ in ("", "other", "a\0b", "\ud800", "x" * 256, None, 5):
        with pytest.raises(TaskResultDoesNotExist):
            any_site.get_result(id_)


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


CALLS_OF_NO_TASK = [
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
]


def test_a_message_that_calls_no_task_is_a_dead_letter_with_the_reason(site: Any) -> None:
    with site.connect() as mailbox:
        sent = mailbox.send_batch([NewMessage("default", payload) for payload, _ in CALLS_OF_NO_TASK])
    assert run_tasks(site) == (0, len(sent))
    assert "antigravity" not in sys.modules
    with site.connect() as mailbox:
        letters = {each.message_id: each for each in mailbox.list_dead_letters().items}
    for message, (_, reason) in zip(sent, CALLS_OF_NO_TASK, strict=True):
        assert isinstance(message, Sent)
        assert reason in (letters[message.message_id].last_error or "")
        with pytest.raises(InvalidTask):
            site.get_result(message.message_id)


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


def run_drill(site: Any, folder: Path, kills: int) -> None:
    """Kill workers in the middle of their tasks; each task succeeds, and few run twice."""
    expected = {f"order {n}" for n in range(100 * kills)}
    with transaction.atomic():
        results = [tasks.place.enqueue(name) for name in sorted(expected)]
    worker = manage(site, folder, "postroom_worker", "--visibility=1s", "--concurrency=4")
    for kill in range(1, kills + 1):
        worker.start(lambda: len(set(names())) > 50 * kill)  # noqa: B023 # it is called before the next one
        worker.kill()
    worker.start(lambda: set(names()) == expected)
    worker.stop()
    assert len(names()) < 1.5 * len(expected)
    for result in results[:: 20 * kills]:
        result.refresh()
        assert result.status == "SUCCESSFUL"


def test_no_task_is_lost_when_its_worker_is_killed(site: Any, tmp_path: Path) -> None:
    run_drill(site, tmp_path, 1)


@pytest.mark.extended
def test_no_task_is_lost_over_many_kills(any_site: Any, tmp_path: Path) -> None:
    run_drill(any_site, tmp_path, 10)
