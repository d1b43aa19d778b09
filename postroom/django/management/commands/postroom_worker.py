"""`manage.py postroom_worker`: a process that runs the tasks of a backend."""

from argparse import ArgumentParser
from functools import partial
from typing import Any

from postroom.adapters.cli.mailbox import use_applied
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_duration
from postroom.adapters.cli.work import run_worker
from postroom.django.backend import PostroomBackend
from postroom.django.management.base import MailboxCommand


class Command(MailboxCommand):
    """Worker of tasks."""

    help = "Run the tasks of a backend of Postroom, until interrupted."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options of a worker that runs alone."""
        super().add_arguments(parser)
        parser.add_argument("--once", action="store_true", help="Run the tasks that are ready, then exit.")

    def handle(self, **options: Any) -> None:
        """Run the worker."""
        self.run("work", partial(self._work, options), options)

    async def _work(self, options: dict[str, Any], session: Session, backend: PostroomBackend) -> None:
        await run_worker(
            session,
            self.make_worker(backend, options),
            backend.connect if backend.is_remote else partial(use_applied, session, apply=False),
            once=options["once"],
            stop_ms=parse_duration(options["stop_within"]),
            metrics_port=options["metrics_port"],
        )
