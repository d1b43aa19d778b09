"""`manage.py postroom_up`: the owner of the mailbox, a worker and the console in one process."""

from argparse import ArgumentParser
from functools import partial
from typing import Any

from postroom.adapters.cli.serve import DEFAULT_HTTP
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.up import run_parts
from postroom.adapters.cli.values import parse_duration
from postroom.django.backend import PostroomBackend
from postroom.django.management.base import MailboxCommand


class Command(MailboxCommand):
    """The owner of a mailbox, a worker and the console in one process."""

    help = "Run the owner of the mailbox, a worker and the console in one process, until interrupted."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options of the console and the other parts."""
        super().add_arguments(parser)
        add = parser.add_argument
        add(
            "--http",
            default=DEFAULT_HTTP,
            metavar="ADDRESS",
            help="Address of the console; default: %(default)s.",
        )
        add("--views", action="store_true", help="Also keep the read models of search up to date.")
        add("--reload", action="store_true", help="Start again when a Python file of this folder changes.")

    def handle(self, **options: Any) -> None:
        """Run the parts."""
        self.run("up", partial(self._run_parts, options), options)

    def _run_parts(self, options: dict[str, Any], session: Session, backend: PostroomBackend) -> None:
        run_parts(
            session,
            lambda: {f"of TASKS[{backend.alias!r}]": self.make_worker(backend, options)},
            http=options["http"],
            views=options["views"],
            reload=options["reload"],
            stop_ms=parse_duration(options["stop_within"]),
            metrics_port=options["metrics_port"],
            apply=False,
        )
