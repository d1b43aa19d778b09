"""A store in streams of JetStream (ADR 0147)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.ownership import JetStreamOwnership
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import StoreStreams
from postroom.application.diagnosis import Finding
from postroom.application.ports.outbox import MessageCount
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import is_mailbox

if TYPE_CHECKING:
    from postroom.adapters.jetstream.log_reader import JetStreamLogReader
    from postroom.adapters.jetstream.read_model_log import JetStreamReadModelLog
    from postroom.adapters.sql.read_models import OpenArchive


class JetStreamStore:
    """A store on NATS servers, replicated by JetStream, without read models of its own; see `Store`.

    Arguments:
        url: see `parse_store_url`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._streams = StoreStreams(parse_store_url(url))
        self._ownership = JetStreamOwnership(self._streams)
        self.where = self._streams.settings.where

    def event_log(
        self, mailbox: str, *, durability: str = "full", can_shrink: bool = False
    ) -> JetStreamEventLog:
        """Open the log of a mailbox for writing; see `Store.event_log`."""
        return JetStreamEventLog(self._streams, mailbox, durable=durability == "full")

    def existing_log(self, mailbox: str) -> JetStreamEventLog:
        """Open the log of a mailbox for reading; see `Store.existing_log`."""
        return JetStreamEventLog(self._streams, mailbox, create_missing=False)

    def ownership(self) -> JetStreamOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return self._ownership

    @property
    def identity(self) -> str:
        """Return servers and stream; see `Store.identity`."""
        hosts, _, name = self.where.partition("://")[2].rpartition("/")
        return f"nats://{','.join(sorted(hosts.split(',')))}/{name}"

    def socket_path(self, mailbox: str) -> None:
        """Return None: servers have no folder of this host; see `Store.socket_path`."""

    def message_outbox(self, mailbox: str) -> None:
        """Return None: JetStream has no transactions of applications; see `Store.message_outbox`."""

    def has_message_outbox(self) -> bool:
        """Return False; see `Store.has_message_outbox`."""
        return False

    def count_messages(self) -> list[MessageCount]:
        """Return nothing: no transaction can record messages here; see `Store.count_messages`."""
        return []

    def mailboxes(self) -> list[str]:
        """Return the names of all mailboxes; see `Store.mailboxes`."""
        try:
            with self._streams.opened() as streams:
                return sorted(filter(is_mailbox, StoreState(streams).mailboxes()))
        except NotFound:
            return []

    def log_reader(self, driver: str = "auto", *, allow_gaps: bool = False) -> "JetStreamLogReader":
        """Return the log reader; see `Store.log_reader`."""
        from postroom.adapters.jetstream.log_reader import JetStreamLogReader  # PyArrow is slow to import

        return JetStreamLogReader(self._url, allow_gaps)

    def read_models(self, open_archive: object = None) -> NoReturn:
        """Raise InvalidRequest: JetStream can't be searched; see `Store.read_models`."""
        raise self._no_read_models()

    def read_model_store(self) -> NoReturn:
        """Raise InvalidRequest; see `read_models`."""
        raise self._no_read_models()

    def read_model_updater(self) -> NoReturn:
        """Raise InvalidRequest; see `read_models`."""
        raise self._no_read_models()

    def followed_log(self) -> "JetStreamReadModelLog":
        """Open the logs for a follower; see `Store.followed_log`."""
        return self.queried_log()

    def queried_log(self, open_archive: "OpenArchive | None" = None) -> "JetStreamReadModelLog":
        """Open the logs for queries; see `Store.queried_log`."""
        from postroom.adapters.jetstream.read_model_log import (
            JetStreamReadModelLog,  # Polars is slow to import
        )

        return JetStreamReadModelLog(StoreStreams(parse_store_url(self._url)), open_archive)

    def save_context_backlog(self, backlog: object) -> NoReturn:
        """Raise InvalidRequest; see `read_models`."""
        raise self._no_read_models()

    def _no_read_models(self) -> InvalidRequest:
        return InvalidRequest(
            f"The store {self.where} has no read models, as JetStream can't be searched; build them "
            "elsewhere with postroom views rebuild --into, and search with --from."
        )


def check_streams(url: str) -> Iterator[Finding]:
    """Find whether the streams of a store can be used, and whether their servers sync every write."""
    streams = StoreStreams(parse_store_url(url))
    where = streams.settings.where
    try:
        with streams.opened() as opened:
            count = len(opened.servers)
            yield Finding("streams", "ok", f"{where}: {pluralize(count, 'replica')}")
            if opened.is_synced():
                yield Finding("durability", "ok", "every commit is synced by the servers")
            else:
                advice = "Set sync_interval: always on the servers; name them with ?monitoring=http://HOST:8222,..."
                yield Finding("durability", "warning", "it can't be seen whether servers sync", advice)
    except NotFound:
        yield Finding("streams", "warning", f"{where} does not exist yet", "The first send creates it.")
    except InvalidRequest as error:
        finding, _, advice = str(error).partition("; ")
        yield Finding("streams", "failure", finding, advice[:1].upper() + advice[1:])
