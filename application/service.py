"""What network surfaces serve: sessions of callers, and whether the service takes writes or is stopping."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from postroom.application.caller import Caller
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.messages import Sent
from postroom.application.metrics import MAILBOX_SECONDS, Measure, Metric, gauge, merge, rejected_metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.events import OutboxCounter
from postroom.application.page import Page
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.ports.read_models import SearchQueries
from postroom.application.query_results import DlqProfile, MessageDetail
from postroom.application.threads import cancel_and_wait
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Right
from postroom.domain.capability.token import Token
from postroom.domain.errors import PostroomError, Rejected, Saturated, Unavailable
from postroom.domain.policy import SECOND_MS
from postroom.domain.search import EventFilter, FoundMessage

Answer = TypeVar("Answer", bound=Sent | Sequence[Sent | Rejected])

RECOVERY_SECONDS = 5.0
"""Time after which a refusal no longer counts, as callers that heed `takes_writes` send nothing meanwhile."""


class WriteHealth:
    """Outcome of the latest sends over all surfaces of a service.

    A refusal counts if it may also meet the next sender: the mailbox is saturated, or its store can't be
    written. Refusals by a caller's quota do not count.
    """

    def __init__(self) -> None:
        self._refused_at: float | None = None

    @property
    def takes_writes(self) -> bool:
        """Return whether no send was refused lately, or one was accepted since."""
        return self._refused_at is None or time.monotonic() - self._refused_at > RECOVERY_SECONDS

    async def watch(self, sending: Awaitable[Answer]) -> Answer:
        """Return the answer of a send, or its error."""
        try:
            answer = await sending
        except PostroomError as error:
            self._note([error])
            raise
        self._note([answer] if isinstance(answer, Sent) else answer)
        return answer

    def _note(self, answers: Sequence[Sent | PostroomError]) -> None:
        if any(isinstance(each, Sent) for each in answers):
            self._refused_at = None
        elif any(_is_general(each) for each in answers):
            self._refused_at = time.monotonic()


def _is_general(answer: Sent | PostroomError) -> bool:
    # The owner of the mailbox counts its refusals, and nobody those of quotas.
    return isinstance(answer, Unavailable) or (isinstance(answer, Saturated) and answer.is_counted)


T = TypeVar("T")

Search = Callable[[EventFilter], Awaitable[Page[FoundMessage]]]
"""Search of the read models of a store."""

Groups = Callable[[DeadLetterGroupFilter], Awaitable[DeadLetterGroupPage]]
"""Query for groups of the dead letters in the read models of a store."""


class Grant(NamedTuple):
    """Rights of a token, for surfaces that show them; the mailbox of the session decides.

    Arguments:
        principal: to whom the token was issued; None without one.
        operations: those that it permits on the mailbox.
        expires: ms since 1970 UTC; None if it never expires.
        covers_all_topics: whether it is not limited to topics.
        covers: returns whether it covers a topic.
        check: raises Forbidden or Unauthenticated unless it permits an operation now, on some topics.
        access: the rights in full; None for a caller who may do everything.
    """

    principal: str | None
    operations: frozenset[Right]
    expires: int | None
    covers_all_topics: bool
    covers: Callable[[str], bool]
    check: Callable[[Right], Awaitable[None]]
    access: Access | None = None


async def _permit(operation: Right) -> None:
    pass


UNRESTRICTED = Grant(None, frozenset(Right), None, True, lambda topic: True, _permit)
"""The grant of an unrestricted caller."""


class AuditedCall(Protocol):
    """Makes a call, and records it before it returns; see `Auditor.run`."""

    async def __call__(
        self,
        operation: Right,
        call: Callable[[], Awaitable[T]],
        count: Callable[[T], int],
        *,
        topics: Sequence[str] = (),
        target: str = "",
        criteria: Sequence[str] = (),
    ) -> T:
        """Return the result of `call`, or raise its error, after the call was recorded."""


async def call_unaudited(
    operation: Right, call: Callable[[], Awaitable[T]], count: Callable[[T], int], **labels: object
) -> T:
    """Return the result of `call` without a record: unrestricted callers are not audited (ADR 0051)."""
    return await call()


class Session(NamedTuple):
    """The service, restricted to the rights of one token (svc-mailbox I-8).

    Arguments:
        mailbox: refuses calls that the token does not permit.
        search: searches the read models for messages that the token permits.
        require: raises Forbidden unless the token permits an operation on the mailbox as a whole.
        read_headers: returns a message with its history, and its envelope without the payload.
        grant: the rights of the token, for display.
        audit: audits calls that are none of the mailbox, such as reads of its log; `call` calls `require`.
        search_queries: restricts the queries around a search to the token.
        caller: the bearer of the token; None without one.
    """

    mailbox: Mailbox
    search: Search
    require: Callable[[Right], None]
    read_headers: Callable[[str], Awaitable[MessageDetail]]
    grant: Grant = UNRESTRICTED
    audit: AuditedCall = call_unaudited
    search_queries: Callable[[SearchQueries], SearchQueries] = lambda queries: queries
    caller: Caller | None = None


OpenSession = Callable[[str | None], Awaitable[Session]]
"""Open the session of a token, or of a caller without one.

Raises: Unauthenticated when the token is missing or invalid.
"""


FindToken = Callable[[str], Awaitable[Token]]
"""Return the token of the id of an access key, which is not a secret, unlike the token.

Raises: Unauthenticated for an id that is malformed or of an unknown root key, Unavailable.
"""


class SurfaceMetrics:
    """Requests of all surfaces of a process, and the metrics of the mailbox.

    Labels are bounded: methods, routes, statuses and codes are fixed.

    Arguments:
        measure: returns the metrics of the mailbox, wherever its owner is; None for none.
        cap_cache_ttl_ms: how long a verified token is not verified again; None without capabilities.
        measure_outboxes: returns the metrics of messages that transactions recorded; they don't depend on the
            owner of the mailbox, which may be down.
    """

    def __init__(
        self,
        measure: Measure | None = None,
        cap_cache_ttl_ms: int | None = None,
        measure_outboxes: Measure | None = None,
    ) -> None:
        self.measure = measure
        self._measure_outboxes = measure_outboxes
        self._cap_cache_ttl_ms = cap_cache_ttl_ms
        self._http: Counter[tuple[str, str, int]] = Counter()
        self._grpc: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[str] = Counter()

    def answered_http(self, method: str, route: str, status: int) -> None:
        """Count an answered HTTP request; the route of an unknown path is `other`."""
        name = method if method in ("GET", "HEAD", "POST", "PUT") else "other"
        self._http[name, route, status] += 1

    def answered_grpc(self, method: str, status: str) -> None:
        """Count a call over gRPC that ended, with the name of its status."""
        self._grpc[method, status] += 1

    def count_answers(self, methods: Collection[str]) -> int:
        """Return the number of calls over gRPC of these methods that succeeded."""
        return sum(self._grpc[method, "OK"] for method in methods)

    def refused(self, error: PostroomError) -> None:
        """Count a refused request, unless the owner of the mailbox has counted it."""
        if not error.is_counted:
            self._rejected[error.code] += 1

    async def collect(self) -> list[Metric]:
        """Return all metrics; while the mailbox can't be used, the metrics of the surfaces."""
        metrics: list[Metric] = []
        is_up = True
        if self.measure is not None:
            try:
                async with asyncio.timeout(MAILBOX_SECONDS):
                    metrics += await self.measure()
            except (PostroomError, TimeoutError):
                is_up = False
        if self._measure_outboxes is not None:
            metrics += await self._measure_outboxes()
        if self._cap_cache_ttl_ms is not None:
            ttl = self._cap_cache_ttl_ms / SECOND_MS
            metrics.append(
                gauge("postroom_cap_cache_ttl_seconds", "Time until a revocation takes effect, at most.", ttl)
            )
        metrics += (
            gauge("postroom_mailbox_up", "1 if the mailbox can be used.", is_up),
            Metric(
                "postroom_http_requests",
                "counter",
                "Requests over HTTP by method, route and status.",
                [
                    ({"method": method, "route": route, "status": str(status)}, number)
                    for (method, route, status), number in sorted(self._http.items())
                ],
            ),
            Metric(
                "postroom_grpc_requests",
                "counter",
                "Calls over gRPC by method and status.",
                [
                    ({"method": method, "status": status}, number)
                    for (method, status), number in sorted(self._grpc.items())
                ],
            ),
            rejected_metric(self._rejected),
        )
        return merge(metrics)


class Service(NamedTuple):
    """What network surfaces serve.

    Arguments:
        mailbox: for actions of the server itself, such as returning the messages of a lost connection; calls
            go to the mailbox of their session.
        stopping: set when the service begins to stop; long polls and streams then end.
        streams: flow control of the streams of all surfaces.
        metrics: of all surfaces and of the mailbox.
        writes: whether sends are accepted.
        is_dev: every caller may do everything; each answer says so.
        dlq_profile: whether dead letters survive a restart.
        groups: groups dead letters, of any topic and mailbox; None for a store without read models.
        outboxes: counts the messages that transactions recorded, also for other mailboxes; None for none.
        find_token: returns the token of an access key; None if the service asks for no tokens.
    """

    mailbox: Mailbox
    open_session: OpenSession
    stopping: asyncio.Event
    streams: DeliveryWindows
    metrics: SurfaceMetrics
    writes: WriteHealth
    is_dev: bool = False
    dlq_profile: DlqProfile = "durable"
    groups: Groups | None = None
    outboxes: OutboxCounter | None = None
    find_token: FindToken | None = None

    async def unless_ended(self, closed: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call that waits; None if its client goes or the service stops before.

        Arguments:
            closed: set when the client is gone.
        """
        waiting = asyncio.ensure_future(call)
        ends = [asyncio.create_task(event.wait()) for event in (closed, self.stopping)]
        try:
            await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
            return None if waiting.cancelled() else waiting.result()
        finally:
            await cancel_and_wait(*ends)
            if not waiting.done():
                await cancel_and_wait(waiting)


Surface = Callable[[Service], AbstractAsyncContextManager[str]]
"""A network surface: it accepts requests within the context, and yields its address.

At the end it stops accepting, finishes the requests in progress within its time limit, and closes.
"""


FindService = Callable[[str | None], Service]
"""Returns the service of a mailbox, or of the only one when no name is given.

Raises: NotFound, or WrongOwner, for a mailbox that this process does not serve; InvalidRequest without a name
    when there are several.
"""


def only(service: Service) -> FindService:
    """Return the lookup of a process that serves one mailbox, which ignores the name.

    A server refuses another name only after it has checked the token, so that nobody else learns its own.
    """
    return lambda mailbox: service


def unrestricted(mailbox: Mailbox, search: Search) -> OpenSession:
    """Return sessions in which every caller may do everything, with or without a token (`serve --dev`)."""
    session = Session(mailbox, search, lambda operation: None, mailbox.get_message)

    async def open_session(token: str | None) -> Session:
        return session

    return open_session
