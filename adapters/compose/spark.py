"""Spark queries on the event log of a store: the data source `postroom_log` by the store's address."""

from collections.abc import Sequence
from typing import ClassVar

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.domain.errors import InvalidRequest
from postroom.projections.ports.log_reader import LogReader
from postroom.projections.spark.source import OPTIONS, LogSource

__all__ = ["StoreLogSource"]


class StoreLogSource(LogSource):
    """The event log of the store that the options name; register it with `spark.dataSource.register`.

    Options, besides those of `LogSource`:
        store: address of the store. Spark shows options, so a URL with a password does not belong here: use
            `read_log` and `follow_log`.
        archive: folder of the records that retention removed, to be read as the log's beginning.
        driver: `adbc`, or `python` for the database's ordinary Python driver; `auto`, the default, chooses.
    """

    allowed: ClassVar[Sequence[str]] = ("store", "archive", "driver", *OPTIONS)

    def open_log(self) -> LogReader:
        """Return the reader of the store's log."""
        store = self.options.get("store")
        if not store:
            raise InvalidRequest("postroom_log needs a store; name one with the option store.")
        driver = self.choice("driver", "auto", "adbc", "python")
        return open_log_reader(open_store(store), self.options.get("archive"), driver)  # type: ignore[arg-type]
