"""Storage of fetched messages in their order, retried through outages of the store (RFC-037 error handling).

An outage of the store must not dead-letter a whole stream. A failed batch is retried without limit, before
any later message; after `max_retries` its messages are also stored one by one, and only a message that fails
repeatedly while others are stored counts as poison. Meanwhile later messages of its sticky key wait.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from postroom.application.ingest.batch_storage import BatchStorage, log_poison
from postroom.application.ingest.settlement import Settlement
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import Fenced, MailboxOwned, Saturated, Unavailable, WrongPosition

_Key = tuple[str, bytes]


class RetryQueue:
    """Messages whose storage failed, in their order; one that is redelivered keeps its place.

    A message may be stored before earlier ones, but not before ones with its sticky key.
    """

    def __init__(self) -> None:
        self._messages: dict[_Key, SourceMessage] = {}
        self._failures: dict[_Key, tuple[int, int]] = {}
        self._first_trial = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[SourceMessage]:
        return iter(self._messages.values())

    def add(self, messages: Iterable[SourceMessage]) -> None:
        """Add messages at the end."""
        for message in messages:
            self._messages[_key(message)] = message

    def remove(self, messages: Iterable[SourceMessage]) -> None:
        """Remove messages that need no retry."""
        for message in messages:
            self._messages.pop(_key(message), None)
            self._failures.pop(_key(message), None)

    def first(self, limit: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages from the beginning."""
        return list(islice(self._messages.values(), limit))

    def sticky_keys(self) -> set[str]:
        """Return the sticky keys whose later messages must wait."""
        return {each.sticky_key for each in self._messages.values() if each.sticky_key is not None}

    def heads(self) -> Sequence[SourceMessage]:
        """Return the messages that may be stored on their own: the first of each sticky key.

        The next call begins with the messages that `note_trials` did not count.
        """
        keys: set[str] = set()
        heads = []
        for message in self._messages.values():
            if message.sticky_key is None:
                heads.append(message)
            elif message.sticky_key not in keys:
                keys.add(message.sticky_key)
                heads.append(message)
        start = self._first_trial % len(heads) if heads else 0
        return heads[start:] + heads[:start]

    def note_trials(self, count: int, *, has_success: bool) -> None:
        """Note how many of the heads were tried in vain, so that the others are tried first the next time."""
        self._first_trial = 0 if has_success else self._first_trial + count

    def count_failure(self, message: SourceMessage, stored: int) -> int:
        """Count a failure of a single message if others were stored since the last one; return the count.

        Arguments:
            stored: number of messages stored so far.
        """
        failures, stored_before = self._failures.get(_key(message), (0, -1))
        if stored > stored_before:
            failures += 1
            self._failures[_key(message)] = (failures, stored)
        return failures


def _key(message: SourceMessage) -> _Key:
    """Identify a message; a topic that was created again has the same sequences."""
    return message.sequence, message.data


MAX_WAITING = 2
"""Batches that wait while one is stored."""
DOWN_AFTER = 3
"""Number of failures in one pass, without a success, after which the store is assumed to be down."""
OWNERSHIP_LOST = (Fenced, WrongPosition, MailboxOwned)


class OrderedStorage:
    """Storage of batches in the order in which they are added, one at a time."""

    def __init__(self, storage: BatchStorage, settlement: Settlement) -> None:
        self._storage = storage
        self._settlement = settlement
        self._waiting: deque[Sequence[SourceMessage]] = deque()
        self._retries = RetryQueue()
        self._in_progress: Sequence[SourceMessage] = ()
        self._failures = 0
        self._pause_ms = 0
        self._has_ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def is_idle(self) -> bool:
        """Return whether every message is stored."""
        return not (self._waiting or self._retries or self._in_progress)

    def add(self, messages: Sequence[SourceMessage]) -> None:
        """Add messages, which are stored after earlier ones."""
        self._waiting.append(messages)
        if len(self._waiting) >= MAX_WAITING:
            self._room.clear()
        self._news.set()

    async def wait_for_room(self) -> None:
        """Return when a batch may be added."""
        await self._room.wait()

    def end(self) -> None:
        """Make `run` return when every message is stored."""
        self._has_ended = True
        self._news.set()

    async def run(self) -> None:
        """Store batches until `end` is called.

        Raises:
            Stopped: the ingester was stopped during an outage.
            Fenced, WrongPosition, MailboxOwned: another process owns the mailbox.
        """
        try:
            while not (self._has_ended and self.is_idle):
                self._news.clear()
                if self._retries:
                    await self._settlement.pause(self._pause_ms, self._unsettled())
                    await self._retry()
                elif not self._waiting:
                    await self._news.wait()
                if self._waiting and self._may_continue():
                    await self._store_next()
        finally:
            self._room.set()

    async def return_unsettled(self) -> None:
        """Request the redelivery of the messages that `run` did not store."""
        if messages := self._unsettled():
            await self._settlement.return_at_once(messages)

    def _unsettled(self) -> Sequence[SourceMessage]:
        waiting = [message for batch in self._waiting for message in batch]
        return [*self._retries, *self._in_progress, *waiting]

    def _may_continue(self) -> bool:
        """Return whether later messages are tried, which show whether only some messages fail."""
        if not self._retries:
            return True
        limit = MAX_WAITING * self._storage.settings.batch_size
        return self._failures > self._storage.settings.max_retries and len(self._retries.heads()) < limit

    def _take_next(self) -> Sequence[SourceMessage]:
        """Return the next batches, as far as they may be stored together."""
        messages = self._waiting.popleft()
        limit = self._storage.settings.batch_size
        while self._waiting and len(messages) + len(self._waiting[0]) <= limit:
            messages = [*messages, *self._waiting.popleft()]
        self._room.set()
        return messages

    async def _store_next(self) -> None:
        self._in_progress = messages = self._take_next()
        if self._retries:
            keys = self._retries.sticky_keys()
            self._retries.add(message for message in messages if message.sticky_key in keys)
            messages = [message for message in messages if message.sticky_key not in keys]
        try:
            full, self._pause_ms = await self._storage.store(messages)
            self._retries.add(full)
        except OWNERSHIP_LOST:
            raise
        except (Saturated, Unavailable) as error:
            self._retries.add(messages)
            self._note_failure(error, len(messages))
        self._in_progress = ()

    async def _retry(self) -> None:
        """Store the messages whose storage failed: together, and after some failures one by one."""
        messages: Sequence[SourceMessage] = ()
        try:
            while self._retries:
                messages = self._retries.first(self._storage.settings.batch_size)
                full, self._pause_ms = await self._storage.store(messages)
                full_ids = {id(message) for message in full}
                self._retries.remove(message for message in messages if id(message) not in full_ids)
                if full:
                    return
            self._failures = 0
        except OWNERSHIP_LOST:
            raise
        except (Saturated, Unavailable) as error:
            self._note_failure(error, len(messages))
            if self._failures > self._storage.settings.max_retries:
                await self._store_singly()

    def _note_failure(self, error: Saturated | Unavailable, messages: int) -> None:
        if isinstance(error, Saturated):
            self._pause_ms = error.retry_after_ms
            return
        self._storage.counts.retries += 1
        logger().retry("ingest.store_unavailable", error=str(error), messages=messages)
        self._failures += 1
        self._pause_ms = self._settlement.backoff_ms(self._failures)

    async def _store_singly(self) -> None:
        """Store messages one by one, to isolate those that always fail."""
        has_success, failures = False, 0
        for message in self._retries.heads():
            if failures == DOWN_AFTER and not has_success:  # try the others first next time
                break
            try:
                full, _ = await self._storage.store([message])
            except OWNERSHIP_LOST:
                raise
            except Saturated:
                continue
            except Unavailable as error:
                failures += 1
                count = self._retries.count_failure(message, self._storage.counts.stored)
                if count <= self._storage.settings.max_retries:
                    continue
                log_poison(message, error)
                await self._storage.dead_letter(message, str(error))
            else:
                has_success = True
                if full:
                    continue
            self._retries.remove([message])
        self._retries.note_trials(failures, has_success=has_success)
        if has_success:
            self._pause_ms = self._settlement.backoff_ms(1)
