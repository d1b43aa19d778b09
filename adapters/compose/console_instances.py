"""Wiring of a console of several mailboxes; a background task opens each when it can be reached."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from postroom.adapters.compose.console_opening import (
    FindFailedWork,
    Frame,
    OpenControlPlane,
    Opener,
    import_app,
    payload_decoder,
)
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.sessions import OneTimeCode
from postroom.adapters.console.settings import ConsoleSettings
from postroom.application.service import Service, SurfaceMetrics
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import background_task
from postroom.domain.errors import InternalError, PostroomError
from postroom.domain.policy import SECOND_MS, OutageBackoff, backoff_ms

if TYPE_CHECKING:  # Starlette is an extra
    from postroom.adapters.console.instances import Instance

BACKOFF: Final = OutageBackoff(500, 15_000)
"""Backoff while the mailbox of an instance can't be reached."""


class InstanceSource(NamedTuple):
    """Source of a mailbox that a console shows beside others.

    Arguments:
        name: name of the instance, as in its path.
        settings: settings of its console.
        open_service: opens its service, which stops when the event is set, and yields it with the token of
            the sessions that the console's link starts; raises PostroomError if the mailbox can't be reached.
        open_control_plane, find_failed_work: see `console_mount`.
    """

    name: str
    store: str
    settings: ConsoleSettings
    open_service: Callable[[asyncio.Event], AbstractAsyncContextManager[tuple[Service, str | None]]]
    open_control_plane: OpenControlPlane | None = None
    find_failed_work: FindFailedWork | None = None


@asynccontextmanager
async def open_instances(
    sources: Sequence[InstanceSource],
    settings: ConsoleSettings,
    metrics: SurfaceMetrics,
    stopping: asyncio.Event,
    code: OneTimeCode,
) -> AsyncIterator[Any]:
    """Yield the application of a console of several mailboxes; the process serves nothing else.

    Arguments:
        settings: settings that name the prefix; each instance has settings of its own, too.
        stopping: set when the process begins to stop.
        code: code of the link.

    Raises: MissingExtra.
    """
    await asyncio.to_thread(import_app)
    from postroom.adapters.console.instances import join

    frame = Frame(settings, trusts_proxy=False, code=code)
    async with open_sources(sources, None, stopping, frame) as instances:
        yield join(instances, settings, metrics, **frame.options)


@asynccontextmanager
async def open_sources(
    sources: Sequence[InstanceSource], own: str | None, stopping: asyncio.Event, frame: Frame
) -> "AsyncIterator[Sequence[Instance]]":
    """Yield instances; a background task opens each when it can be reached.

    Arguments:
        own: name of the mailbox that the process serves itself; None if it serves no mailbox.
    """
    await asyncio.to_thread(import_app)
    from postroom.adapters.console.app import new_sessions
    from postroom.adapters.console.instances import Instance, find_places

    places = find_places([each.name for each in sources])
    siblings = places if own is None else {own: ""} | places
    instances = [
        Instance(each.name, places[each.name], new_sessions(each.settings), siblings) for each in sources
    ]
    async with AsyncExitStack() as opened:
        for instance, source in zip(instances, sources, strict=True):
            opened.push_async_callback(instance.close)
            await opened.enter_async_context(background_task(_keep_open(instance, source, stopping, frame)))
        yield instances


async def _keep_open(
    instance: "Instance", source: InstanceSource, stopping: asyncio.Event, frame: Frame
) -> None:
    """Open the console of an instance as soon as its mailbox can be reached, until the task is cancelled."""
    own, common = source.settings, frame.settings
    settings = msgspec.structs.replace(own, prefix=common.prefix, proxy_prefix=common.proxy_prefix)
    failures = 0
    while True:
        try:
            file = settings.namespaces
            decode = None if file is None else await asyncio.to_thread(payload_decoder, file)
            opener = Opener(
                source.store, settings, source.open_control_plane, source.find_failed_work, decode
            )
            async with AsyncExitStack() as opened:
                service, token = await opened.enter_async_context(source.open_service(stopping))
                samples = Samples(service.mailbox, service.metrics.measure)
                options = {"place": instance.place, "sessions": instance.sessions}
                instance.open(await opener.open(service, samples, opened, frame, **options), token)
                await samples.run(stopping)
                await asyncio.Event().wait()  # requests in progress end before the mailbox is closed
        except PostroomError as error:
            instance.error = error
        except Exception as error:
            logger().exception("console.instance_failed", instance=instance.name)
            instance.error = InternalError(summarize(error))
        failures += 1
        await asyncio.sleep(backoff_ms(BACKOFF, failures, random.random()) / SECOND_MS)
