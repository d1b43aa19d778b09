"""Actions on queues: their existence, attributes, tags and content."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from postroom.adapters.sqs.attributes import (
    OWN,
    READABLE,
    Queue,
    change_queue,
    check_name,
    count_attributes,
    find_queue,
    new_queue,
    permits,
)
from postroom.adapters.sqs.call import Call, check_range
from postroom.adapters.sqs.dead_letters import REASONS, count_dead, fetch, finish, sources_of
from postroom.adapters.sqs.errors import SqsError, invalid_attribute, invalid_value, missing
from postroom.adapters.sqs.requests import (
    Attributes,
    CreateQueue,
    Empty,
    GetQueueAttributes,
    GetQueueUrl,
    ListQueues,
    ListSources,
    QueueRequest,
    QueueUrl,
    QueueUrls,
    SetQueueAttributes,
    SourceUrls,
    TagQueue,
    Tags,
    UntagQueue,
)
from postroom.domain.capability.rights import Right
from postroom.domain.errors import NotFound
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.settings import MailboxSettings, SettingsChanges, change_settings

MAX_LISTED: Final = 1_000
MAX_TAGS: Final = 50
VISIBLE: Final = "ApproximateNumberOfMessages"


async def create_queue(call: Call, request: CreateQueue) -> QueueUrl:
    """Create a queue; an existing queue must have the given attributes."""
    name = request.queue_name
    if not name:
        raise missing("QueueName")
    call.check_covered(name)
    await call.grant.check(Right.READ_HEADERS)
    settings = await call.service.mailbox.get_settings()
    try:
        queue = find_queue(settings, name)
    except SqsError:
        check_name(name)
        _check_tags(request.tags)
        changes = new_queue(name, request.attributes, request.tags)
        _check_target(call, settings, change_settings(settings, changes), name)
        await call.mailbox.set_settings(changes)
        return QueueUrl(queue_url=call.url(name))
    _check_same(settings, queue, request)
    return QueueUrl(queue_url=call.url(name))


def _check_same(settings: MailboxSettings, queue: Queue, request: CreateQueue) -> None:
    """Raise SqsError if a queue that exists has another value for an attribute."""
    attributes = {name: value for name, value in request.attributes.items() if name != "FifoQueue"}
    changed = find_queue(change_settings(settings, change_queue(queue, attributes)), queue.name)
    before, after = queue.describe(), changed.describe()
    for name in attributes:
        if before.get(name) != after.get(name):
            raise SqsError(
                "QueueNameExists",
                f"A queue already exists with the same name and a different value for attribute {name}",
            )


async def get_queue_url(call: Call, request: GetQueueUrl) -> QueueUrl:
    """Return the URL of a queue."""
    if not request.queue_name:
        raise missing("QueueName")
    queue = await call.find(request.queue_name)
    return QueueUrl(queue_url=call.url(queue.name))


async def list_all(call: Call, request: ListQueues) -> QueueUrls:
    """Return a page of the queues whose names begin with a prefix, sorted by name."""
    names = [each.name for each in await call.list_all() if each.name.startswith(request.queue_name_prefix)]
    page, cursor = _page(names, request)
    return QueueUrls(queue_urls=list(map(call.url, page)), next_token=cursor)


async def list_sources(call: Call, request: ListSources) -> SourceUrls:
    """Return a page of the queues whose dead-letter queue this one is."""
    target = await call.queue(request.queue_url)
    names = [each.name for each in await call.list_all() if each.dead_letter_queue == target.name]
    page, cursor = _page(names, request)
    return SourceUrls(queue_urls=list(map(call.url, page)), next_token=cursor)


def _page(names: Sequence[str], request: ListQueues | ListSources) -> tuple[list[str], str | None]:
    check_range("MaxResults", request.max_results, 1, MAX_LISTED)
    rest, limit = list(names), request.max_results or MAX_LISTED
    if request.next_token is not None:
        try:
            after = urlsafe_b64decode(request.next_token).decode()
        except ValueError:
            raise invalid_value("NextToken", request.next_token, "It is not of this action.") from None
        rest = [each for each in names if each > after]
    page = rest[:limit]
    return page, urlsafe_b64encode(page[-1].encode()).decode() if len(rest) > limit else None


async def get_queue_attributes(call: Call, request: GetQueueAttributes) -> Attributes:
    """Return attributes of a queue."""
    queue = await call.readable(request.queue_url)
    names = set(request.attribute_names)
    if unknown := names - READABLE:
        raise SqsError("InvalidAttributeName", f"Unknown Attribute {min(unknown)}.")
    values = queue.describe()
    if "All" in names or any(each.startswith("Approximate") for each in names):
        topics = await call.mailbox.list_topics()
        values |= count_attributes(next((each for each in topics if each.topic == queue.name), None))
        dead = await count_dead(call, await sources_of(call, queue))
        values[VISIBLE] = str(int(values[VISIBLE]) + dead)
    return Attributes(
        attributes={name: value for name, value in values.items() if "All" in names or name in names}
    )


async def set_queue_attributes(call: Call, request: SetQueueAttributes) -> Empty:
    """Change attributes of a queue."""
    queue = await call.queue(request.queue_url)
    if not request.attributes:
        raise missing("Attributes")
    changes = change_queue(queue, request.attributes)
    settings = await call.service.mailbox.get_settings()
    if "RedrivePolicy" in request.attributes:
        _check_target(call, settings, change_settings(settings, changes), queue.name)
    await call.mailbox.set_settings(changes)
    return Empty()


def _check_target(call: Call, settings: MailboxSettings, after: MailboxSettings, name: str) -> None:
    """Raise SqsError unless the caller may know a queue's dead-letter queue, which must permit it."""
    target = find_queue(after, name).dead_letter_queue
    if target is None:
        return
    call.check_covered(target)
    try:
        queue = find_queue(settings, target)
    except SqsError:
        raise invalid_attribute("RedrivePolicy", "Dead letter target does not exist.") from None
    if not permits(queue, name):
        raise invalid_attribute("RedrivePolicy", "The dead letter target does not permit this source queue.")


async def tag_queue(call: Call, request: TagQueue) -> Empty:
    """Set tags of a queue."""
    queue = await call.queue(request.queue_url)
    if not request.tags:
        raise missing("Tags")
    _check_tags({**queue.tags, **request.tags})
    await call.mailbox.set_settings(SettingsChanges(labels={queue.name: request.tags}))
    return Empty()


async def untag_queue(call: Call, request: UntagQueue) -> Empty:
    """Remove tags of a queue."""
    queue = await call.queue(request.queue_url)
    if not request.tag_keys:
        raise missing("TagKeys")
    removed = dict.fromkeys(name for name in request.tag_keys if name in queue.tags)
    await call.mailbox.set_settings(SettingsChanges(labels={queue.name: removed}))
    return Empty()


async def list_queue_tags(call: Call, request: QueueRequest) -> Tags:
    """Return the tags of a queue."""
    return Tags(tags=(await call.readable(request.queue_url)).tags)


def _check_tags(tags: dict[str, str]) -> None:
    if len(tags) > MAX_TAGS:
        raise invalid_value("Tags", len(tags), f"A queue has up to {MAX_TAGS} tags.")
    for name, value in tags.items():
        if not 1 <= len(name) <= 128 or name.startswith((OWN, "aws:")) or len(value) > 256:
            raise invalid_value(
                "Tags", name, "A key has 1 to 128 characters and does not begin with aws:, a value up to 256."
            )


async def purge_queue(call: Call, request: QueueRequest) -> Empty:
    """Remove the messages of a queue, also those in flight."""
    queue = await call.queue(request.queue_url)
    if sources := await sources_of(call, queue):  # first, as the job may be refused
        spec = RedriveSpec(action="purge", topics=sources, reasons=REASONS)
        await finish(call.mailbox, await call.mailbox.start_redrive(spec))
    await _empty(call, queue.name)
    return Empty()


async def delete_queue(call: Call, request: QueueRequest) -> Empty:
    """Delete a queue with its messages."""
    queue = await call.queue(request.queue_url)
    name = queue.name
    removed = SettingsChanges(topics={name: None}, labels={name: None})
    await call.mailbox.preview_settings(removed)  # refused before a message is removed
    await _empty(call, name)
    if queue.dead_letter_queue is not None:  # the dead-letter queue keeps them
        await fetch(call, queue.dead_letter_queue, [name])
    await call.mailbox.set_settings(removed)
    return Empty()


async def _empty(call: Call, name: str) -> None:
    topics = {each.topic: each for each in await call.mailbox.list_topics()}
    if name not in topics:
        return
    has_hidden = bool(topics[name].in_flight or topics[name].delayed)
    if has_hidden:
        await call.grant.check(Right.REDRIVE)
    with suppress(NotFound):
        await call.mailbox.purge_topic(name, dead=False, ready=True)
    if has_hidden:
        job = await call.mailbox.start_redrive(RedriveSpec(action="cancel", topics=(name,)))
        await finish(call.mailbox, job)
