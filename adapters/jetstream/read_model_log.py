"""The logs of a store in JetStream, for read models that are built of it elsewhere."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import groupby
from threading import Lock

from nats.errors import Error as NatsError
from sqlalchemy import Connection

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.log_reader import mailbox_ids
from postroom.adapters.jetstream.ownership import JetStreamOwnership
from postroom.adapters.jetstream.store_streams import READ_SECONDS, OpenStreams, StoreStreams
from postroom.adapters.sql.read_models import OpenArchive, QueriedLog
from postroom.application.mailbox.codec import envelopes_by_position
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import MailboxOwned, Unavailable
from postroom.projections.incremental import START, Cursor, Head
from postroom.projections.models.messages import without_token
from postroom.projections.ports.read_model_store import FollowedLog


class JetStreamReadModelLog(FollowedLog, QueriedLog):
    """The logs of a store, over a connection that is open from the first call on."""

    def __init__(self, streams: StoreStreams, open_archive: OpenArchive | None = None) -> None:
        self.open_archive = open_archive
        self._shared = streams
        self._ownership = JetStreamOwnership(streams)
        self._open: OpenStreams | None = None
        self._lock = Lock()
        self._last = 0

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open = None
                self._shared.close()

    # -- for a follower ---

    @contextmanager
    def leader_lock(self, target: str = "") -> Iterator[bool]:
        """Own a name in the store; see `FollowedLog.leader_lock`.

        A process that loses its connection for long may lose the lock and not notice: what it then applies is
        refused, as the cursors have moved.
        """
        streams, stack = self._streams(), AsyncExitStack()
        owner = f"postroom views follow, process {os.getpid()} on {socket.gethostname()}"
        lock = self._ownership.acquire(_lock_name(target), owner, 0)
        is_leader = True
        try:
            streams.call(lambda _: stack.enter_async_context(lock))
        except MailboxOwned:
            is_leader = False
        try:
            yield is_leader
        finally:
            streams.call(lambda _: stack.aclose())

    def heads(self, cursors: Mapping[int, Cursor]) -> list[Head]:
        return [
            self._head(name, id_, cursors.get(id_, START).position)
            for name, id_ in mailbox_ids(self._streams()).items()
        ]

    def wait_for_commit(self, seconds: float) -> bool:
        """Wait for a message at a subject of the logs; see `FollowedLog.wait_for_commit`."""
        streams = self._streams()
        try:
            return streams.call(partial(self._wait, streams, seconds), seconds + READ_SECONDS)
        except (NatsError, OSError) as error:
            raise Unavailable(
                f"The store {streams.settings.where} can't be followed at the moment: {error}; retry shortly."
            ) from error

    async def _wait(self, streams: OpenStreams, seconds: float, deadline: float) -> bool:
        # Subscribed only while nothing comes: otherwise all messages would be transferred twice.
        subscription = await streams.client.subscribe(f"{streams.settings.stream}.*")
        try:
            await streams.client.flush()
            last = (await streams.log.info(deadline))["state"]["last_seq"]
            if last != self._last:  # appended since the last time
                self._last = last
                return True
            try:
                await subscription.next_msg(timeout=seconds)
            except TimeoutError:
                return False
            return True
        finally:
            with suppress(NatsError, OSError):  # it ended with its connection
                await subscription.unsubscribe()

    def _head(self, mailbox: str, id_: int, position: int) -> Head:
        with closing(self._log(mailbox)) as log:
            head, removed = log.head(), log.removed()
            if head is None:
                return Head(id_, mailbox, removed + 1, removed)
            if position == head.position:
                return Head(id_, mailbox, removed + 1, position, head.chain.hex(), head.at)
            for commit in log.commits_of([position], envelopes=False) if position else ():
                return Head(id_, mailbox, removed + 1, head.position, commit.chain.hex(), commit.at)
            return Head(id_, mailbox, removed + 1, head.position)

    # -- for queries ---

    def contexts(self) -> tuple[ContextBacklog, ...]:
        """Return nothing: backlogs are counted beside read models of the store; see `ReadModels.contexts`."""
        return ()

    def log_heads(self, cursors: Mapping[int, Cursor]) -> list[Head]:
        return self.heads(cursors)

    def log_envelopes(self, db: Connection | None, places: Sequence[int]) -> dict[int, bytes]:
        names = {id_: name for name, id_ in mailbox_ids(self._streams()).items()}
        envelopes: dict[int, bytes] = {}
        for id_, group in groupby(sorted(places), lambda place: place // POSITIONS_PER_MAILBOX):
            if id_ not in names:
                continue
            base, messages = id_ * POSITIONS_PER_MAILBOX, set(group)
            with closing(self._log(names[id_])) as log:
                for commit in log.commits_of([place - base for place in messages]):
                    for position, envelope in envelopes_by_position(commit).items():
                        if base + position in messages:
                            envelopes[base + position] = without_token(envelope)
        return envelopes

    def log_time_after(self, mailbox: str, position: int) -> int | None:
        with closing(self._log(mailbox)) as log:
            return next((commit.at for commit in log.commits(position, envelopes=False)), None)

    def is_following(self, target: str = "") -> bool:
        return self._streams().call(lambda _: self._ownership.owner(_lock_name(target))) is not None

    def _log(self, mailbox: str) -> JetStreamEventLog:
        """Open a log, which remembers nothing of an earlier one: it may have been replaced."""
        return JetStreamEventLog(self._shared, mailbox, create_missing=False)

    def _streams(self) -> OpenStreams:
        with self._lock:
            if self._open is None:
                self._open = self._shared.open()
            return self._open


def _lock_name(target: str) -> str:
    """Return the name that a follower owns, which no mailbox can have."""
    return f"follow {target}"
