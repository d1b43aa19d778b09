"""A site of Django for tests: its settings, its databases, and runs of its tasks."""

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django.conf
import django.db
import psycopg
from asgiref.sync import SyncToAsync

if TYPE_CHECKING:
    from tests.support.servers.process import ServerProcess

BACKEND = "postroom.django.PostroomBackend"
BACKPORT = [] if find_spec("django.tasks") else ["django_tasks"]


APPS = ["admin", "auth", "contenttypes", "messages", "sessions"]
TEMPLATES = {
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {
        "context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]
    },
}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]


def configure(**settings: Any) -> None:
    """Configure Django for this process, unless it is."""
    if django.conf.settings.configured:
        return
    own = ["postroom.django", *BACKPORT, "tests.support.django_site"]
    django.conf.settings.configure(
        INSTALLED_APPS=[*own, *(f"django.contrib.{name}" for name in APPS)],
        MIDDLEWARE=MIDDLEWARE,
        TEMPLATES=[TEMPLATES],
        MIGRATION_MODULES=dict.fromkeys(APPS),  # their tables are made at once
        ROOT_URLCONF="tests.support.django_site.urls",
        USE_TZ=True,
        SECRET_KEY="site",
        **settings,
    )
    django.setup()


def database_of(address: str, **options: Any) -> dict[str, Any]:
    """Return the settings of a database by its path or its URL."""
    if "://" not in address:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": address,
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            **options,
        }
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
    parts = psycopg.conninfo.conninfo_to_dict(address)
    database = {names[name]: str(value) for name, value in parts.items()}
    return {"ENGINE": "django.db.backends.postgresql", **database, **options}


@contextmanager
def databases(**addresses: str | dict[str, Any]) -> Iterator[None]:
    """Have Django use databases, by alias, as the settings of a site do."""
    configure()
    _forget(addresses)  # connections of settings before these
    connections: Any = django.db.connections
    connections.settings = connections.configure_settings(
        {alias: database_of(each) if isinstance(each, str) else each for alias, each in addresses.items()}
    )
    try:
        yield
    finally:
        _forget(addresses)


def _forget(aliases: Iterable[str]) -> None:
    """Close the connections of this thread, and of the one in which asynchronous code uses databases."""

    def forget() -> None:
        for alias in aliases:
            with suppress(AttributeError):
                getattr(django.db.connections._connections, alias).close()
                del django.db.connections[alias]

    forget()
    SyncToAsync.single_thread_executor.submit(forget).result()


@contextmanager
def backends(**backends: Mapping[str, Any]) -> Iterator[Any]:
    """Have Django use backends of tasks by alias, each given by its settings; yields the default one."""
    configure()
    from django.test import override_settings

    from postroom.django.framework import task_backends

    with override_settings(TASKS={alias: {"BACKEND": BACKEND, **each} for alias, each in backends.items()}):
        yield task_backends["default"]


def migrate(alias: str = "default") -> None:
    """Create the tables of the app and of the site."""
    from django.core.management import call_command

    call_command("migrate", database=alias, run_syncdb=True, verbosity=0)


def run_tasks(backend: Any, **options: Any) -> tuple[int, int]:
    """Run the tasks that are due; return how many succeeded, and how many failed."""
    from postroom.django.worker import TaskWorker

    async def run() -> tuple[int, int]:
        async with backend.connect() as mailbox:
            counts = await TaskWorker(backend, **options).run(mailbox, once=True)
        return counts.handled, counts.failed

    return asyncio.run(run())


def main() -> None:
    """Be `manage.py`: the first two arguments are the database and the store."""
    address, store, *arguments = sys.argv[1:]
    configure(
        DATABASES={"default": database_of(address)},
        TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"store": store}}},
    )
    from django.core.management import execute_from_command_line

    execute_from_command_line([str(Path(__file__)), *arguments])


def manage(backend: Any, folder: Path, *arguments: str) -> "ServerProcess":
    """Return a process of `manage.py`, for the database and the store of a backend."""
    from postroom.django.database import address_of
    from tests.support.servers.process import ServerProcess

    address = str(address_of(django.db.connections[backend.database]))
    command = [sys.executable, "-m", __name__, address, backend.store, *arguments, "--skip-checks"]
    return ServerProcess(arguments[0], command, folder / f"{arguments[0]}.log")
