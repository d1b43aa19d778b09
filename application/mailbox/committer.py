"""The committer: appends groups in order and answers them when they are durable."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any

from postroom.application.mailbox.group import Group, Request
from postroom.application.mailbox.log_writer import LogWriter
from postroom.application.mailbox.metrics import MailboxMetrics
from postroom.domain.commit import Commit
from postroom.domain.errors import PostroomError

APPENDS_IN_PROGRESS = 2
"""Maximum number of appends in progress; two, so that the log never waits for the next group."""


class Committer:
    """Committer of groups; answers each when its events and all earlier ones are durable.

    A group without events is answered once the log shows that no other process has taken the mailbox over.
    """

    def __init__(
        self,
        writer: LogWriter,
        check_ownership: Callable[[], Coroutine[Any, Any, None]],
        on_failure: Callable[[PostroomError], None],
        refuse: Callable[[Sequence[Request], PostroomError], None],
        metrics: MailboxMetrics,
    ) -> None:
        """Initialise with the log's writer.

        Arguments:
            check_ownership: see `MailboxEngine.check_ownership`; called for groups without events.
            on_failure: called with the first failed append of a state; it must invalidate the state.
            refuse: called with the requests of each group whose state is void, and the reason.
        """
        self._writer = writer
        self._check_ownership = check_ownership
        self._on_failure = on_failure
        self._refuse = refuse
        self._metrics = metrics
        self._in_progress: deque[asyncio.Task[None]] = deque()

    def commit(self, group: Group, commits: Sequence[Commit]) -> None:
        """Start to append the commits of a group, without waiting."""
        previous = self._in_progress[-1] if self._in_progress else None
        append = self._writer.append(commits) if commits else None
        count = sum(commit.event_count for commit in commits)
        self._in_progress.append(asyncio.create_task(self._finish(group, append, count, previous)))

    @property
    def in_progress(self) -> int:
        """Return the number of groups that may not be durable yet."""
        return len(self._in_progress)

    async def wait_for_room(self) -> None:
        """Wait until another append may be started."""
        while len(self._in_progress) >= APPENDS_IN_PROGRESS:
            await asyncio.wait([self._in_progress[0]])

    async def wait_until_durable(self) -> None:
        """Wait until every append has ended; then the log matches the state, or the state is void."""
        while self._in_progress:
            await asyncio.wait([self._in_progress[0]])

    async def _finish(
        self,
        group: Group,
        append: asyncio.Future[None] | None,
        count: int,
        previous: asyncio.Task[None] | None,
    ) -> None:
        failure: PostroomError | None = None
        began = perf_counter()
        try:
            if append is not None:
                await append
                self._metrics.commit.observe(perf_counter() - began)
                self._metrics.batch.observe(count)
                self._metrics.count_topics(group.events)
            elif group.requests:  # answered from memory, which counts only while nobody else owns the mailbox
                await self._check_ownership()
        except PostroomError as error:
            failure = error
        if previous is not None:
            await previous
        self._in_progress.popleft()
        if group.state.failure is None and failure is not None and append is not None:
            self._on_failure(failure)
        if refusal := group.state.failure or failure:
            self._refuse(group.requests, refusal)
        else:
            group.answer()
