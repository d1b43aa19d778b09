"""`MailboxCommand`: the options and the session of the commands that run tasks."""

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import msgspec
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.utils.log import configure_logging

from postroom.adapters.cli.command import no_flags, run_command
from postroom.adapters.cli.logs import log_application
from postroom.adapters.cli.session import RelaySettings, Session
from postroom.application.telemetry import ROOT
from postroom.django.backend import PostroomBackend
from postroom.django.framework import task_backends
from postroom.django.worker import VISIBILITY, TaskWorker
from postroom.domain.errors import PostroomError


class MailboxCommand(BaseCommand):  # type: ignore[misc] # Django has no types
    """Base of the commands of the app, which `postroom.toml` and `POSTROOM_*` configure besides `TASKS`."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options of a worker."""
        add = parser.add_argument
        add("--backend", default="default", metavar="ALIAS", help="Backend of TASKS; default: %(default)s.")
        add("--queue", action="append", default=[], metavar="NAME", help="Queue; default: all of QUEUES.")
        add(
            "--concurrency",
            type=int,
            default=1,
            metavar="N",
            help="Tasks of a queue that run at once; default: 1.",
        )
        add(
            "--visibility",
            default=VISIBILITY,
            metavar="DURATION",
            help="Time after which the tasks of a killed worker run again; default: %(default)s.",
        )
        add(
            "--stop-within",
            default="10s",
            metavar="DURATION",
            help="Time for running tasks after SIGTERM; default: %(default)s.",
        )
        add("--metrics-port", type=int, metavar="PORT", help="Serve metrics and health at this port.")
        add("--config", metavar="FILE", help="Settings file; default: ./postroom.toml, if it exists.")
        add(
            "--log-level",
            metavar="LEVEL",
            help="Log level of Postroom: debug, info, warning (default) or error.",
        )

    def run(
        self, command: str, function: Callable[[Session, PostroomBackend], Any], options: dict[str, Any]
    ) -> None:
        """Call a function with a session for the mailbox of the backend.

        Raises: CommandError.
        """

        def call(session: Session) -> Any:
            _log_project(session.settings.log_level)
            return function(_session_of(session, backend), backend)

        flags = no_flags() | {name: options[name] for name in ("config", "log_level")}
        try:
            backend = _find_backend(options["backend"])
            run_command(command, flags, call, {})
        except (PostroomError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def make_worker(self, backend: PostroomBackend, options: dict[str, Any]) -> TaskWorker:
        """Return the worker that the options describe; raises as `TaskWorker`."""
        return TaskWorker(
            backend,
            options["queue"],
            concurrency=options["concurrency"],
            visibility=options["visibility"],
        )


def _find_backend(alias: str) -> PostroomBackend:
    backend = task_backends[alias]
    if not isinstance(backend, PostroomBackend):
        raise CommandError(
            f"TASKS[{alias!r}] has the backend {type(backend).__qualname__}, not "
            "postroom.django.PostroomBackend; name another with --backend."
        )
    backend.ensure_valid()
    return backend


def _session_of(session: Session, backend: PostroomBackend) -> Session:
    """Return a session for the mailbox of a backend, whose owner also watches the backend's database."""
    own = session.settings
    named = own.section("relay", RelaySettings).databases
    databases = [*dict.fromkeys([*named, *backend.find_outboxes()])]
    return session.with_settings(
        msgspec.structs.replace(
            own,
            store=backend.store,
            mailbox=backend.mailbox,
            sections={**own.sections, "relay": {"databases": databases}},
        )
    )


def _log_project(levels: str) -> None:
    """Log the lines of the project's apps, on the root logger of the settings if they configure one."""
    if settings.LOGGING_CONFIG and "root" in settings.LOGGING:
        configure_logging(settings.LOGGING_CONFIG, settings.LOGGING)
    for config in apps.get_app_configs():
        if config.name.partition(".")[0] not in ("django", ROOT):
            log_application(config.name, levels)
