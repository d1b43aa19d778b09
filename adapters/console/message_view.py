"""A message as pages show it: its headers and life."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from postroom.application.masking import MASK, Mask
from postroom.application.payload_preview import read_envelope
from postroom.application.queries.redrive_lineage import DeadLettering, lineage_of
from postroom.application.query_results import Explanation, MessageDetail
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.message import MS

MESSAGE, SEARCH = "message", "search"
MAX_EVENTS = 500
"""Number of events in the timeline: the first, and the latest."""
MAX_DEAD_LETTERINGS = 50


class Header(NamedTuple):
    """A header of a message.

    Arguments:
        link: `message` if the value is the id of another message, `search` if it leads to a search.
        parameter: name of the search's parameter for the value.
    """

    name: str
    value: str
    link: str = ""
    parameter: str = ""


class TimelineEntry(NamedTuple):
    """An event of a message.

    Arguments:
        why: the reason of a redelivery, as a sentence; empty for other events.
        job: id of the redrive job that caused the event.
        copy: id of the copy that the job sent.
        original: id of the message that this one is a copy of.
    """

    position: int
    at: str
    event: str
    epoch: int
    text: str
    why: str
    job: str
    copy: str
    original: str


class LastDeadLettering(NamedTuple):
    """The latest dead-lettering of a dead letter.

    Arguments:
        at: log time.
        text: what happened, as sentences.
        consumer: of the last delivery; empty without one, and for a consumer without a name.
        principal: of the capability of that consumer; empty for a process of the mailbox's own user.
    """

    at: str
    text: str
    consumer: str
    principal: str


class MessageView(NamedTuple):
    """A message as the page shows it.

    Arguments:
        published_at: µs since 1970 UTC.
        now: the current state, as a sentence.
        is_masked: whether the value of any header is hidden.
        envelope: None if it was altered and can't be parsed.
        omitted: number of events that are not in the timeline.
        dead_letterings: the latest ones.
        original_subject: the subject that it was ingested from; empty if it was sent directly.
        copy_of: id of the original, if this message is a subscription's copy; empty for any other message.
        last_dead_lettering: None unless it is a dead letter.
    """

    id: str
    topic: str
    shard: int
    mailbox: str
    published_at: int
    status: str
    attempt: int
    redriven: int
    reason: str
    last_error: str
    is_intact: bool
    now: str
    headers: tuple[Header, ...]
    custom_headers: tuple[Header, ...]
    timeline: tuple[TimelineEntry, ...]
    omitted: int
    dead_letterings: tuple[DeadLettering, ...]
    original_subject: str
    copy_of: str
    is_masked: bool
    envelope: PrismEnvelope | None
    last_dead_lettering: LastDeadLettering | None


def make_view(detail: MessageDetail, explanation: Explanation, mask: Mask) -> MessageView:
    """Return the view of a message.

    Arguments:
        mask: headers that are hidden from the reader.
    """
    envelope = read_envelope(detail)
    item = mask.hide_item(detail.item)
    lineage = lineage_of(detail)
    subject = lineage.original_subject
    timeline = tuple(_timeline(detail, explanation, mask))
    omitted = max(0, len(timeline) - MAX_EVENTS)
    return MessageView(
        detail.message_id,
        detail.topic,
        detail.shard,
        detail.mailbox,
        item.timestamp * MS,
        detail.status,
        detail.attempt,
        detail.redriven,
        detail.reason or "",
        detail.last_error or "",
        detail.intact,
        explanation.now,
        tuple(_headers(item, envelope, mask)),
        tuple(Header(name, value) for name, value in sorted(item.custom_headers.items())),
        timeline[:1] + timeline[1 + omitted :],
        omitted,
        tuple(lineage.dead_letterings[-MAX_DEAD_LETTERINGS:]),
        subject if subject in item.custom_headers.values() else "",
        detail.copy_of or "",
        hides_headers(detail, envelope, mask),
        envelope,
        _last_dead_lettering(detail, explanation) if detail.status == "dead" else None,
    )


def _last_dead_lettering(detail: MessageDetail, explanation: Explanation) -> LastDeadLettering | None:
    positions = [each.position for each in detail.history if each.event == "MessageDeadLettered"]
    step = next((each for each in reversed(explanation.story) if each.position in positions), None)
    if step is None:
        return None
    last = explanation.deliveries[-1] if explanation.deliveries else None
    consumer, principal = (last.consumer, last.principal) if last is not None else (None, None)
    return LastDeadLettering(step.at, step.text, consumer or "", principal or "")


def _headers(item: MailboxItem, envelope: PrismEnvelope | None, mask: Mask) -> Iterator[Header]:
    for name, label, link, parameter in _SHOWN:
        value = getattr(item, name)
        if value is not None:
            is_hidden = value == MASK
            yield Header(label, value, "" if is_hidden else link, parameter)
    if envelope is None:
        return
    for name, value in _other_headers(envelope).items():
        is_hidden = mask.covers_header(name)
        link = MESSAGE if name == "causality_parent" and not is_hidden else ""
        yield Header(_OTHERS[name], MASK if is_hidden else value, link)


def hides_headers(detail: MessageDetail, envelope: PrismEnvelope | None, mask: Mask) -> bool:
    """Return whether a mask hides the value of any header of a message."""
    others = {} if envelope is None else _other_headers(envelope)
    return mask.hide_item(detail.item) is not detail.item or any(map(mask.covers_header, others))


def _other_headers(envelope: PrismEnvelope) -> dict[str, str]:
    """Return the headers that are set and not searchable."""
    content = OpenedEnvelope(envelope)
    values = {
        "causality_parent": content.causality_parent,
        "content_encoding": content.content_encoding,
        "payload_type": envelope.payload.type_url or None,
        "ttl_seconds": f"{content.ttl_seconds:,} s" if content.ttl_seconds > 0 else None,
        "priority": str(content.priority),
        "baggage": ", ".join(f"{key}={value}" for key, value in sorted(content.baggage.items())) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


_SHOWN = (
    ("correlation_id", "correlation id", SEARCH, "correlation_id"),
    ("principal", "principal", SEARCH, "principals"),
    ("namespace", "namespace", "", ""),
    ("content_type", "content type", "", ""),
    ("schema_url", "schema", "", ""),
    ("schema_version", "schema version", "", ""),
    ("encryption", "encryption", "", ""),
    ("trace_id", "trace id", SEARCH, "trace_id"),
    ("span_id", "span id", "", ""),
)
_OTHERS = {
    "causality_parent": "caused by",
    "content_encoding": "content encoding",
    "payload_type": "payload type",
    "ttl_seconds": "time to live",
    "priority": "priority",
    "baggage": "baggage",
}


def _timeline(detail: MessageDetail, explanation: Explanation, mask: Mask) -> Iterator[TimelineEntry]:
    events = {entry.position: entry for entry in detail.history}
    reasons = {each.position: each.why for each in explanation.deliveries if each.number > 1}
    for step in explanation.story:
        entry = events.get(step.position)
        facts: Mapping[str, Any] = entry.facts if entry is not None else {}
        text = mask.hide_sender(step.text, detail.item.principal)
        yield TimelineEntry(
            step.position,
            step.at,
            entry.event if entry is not None else "",
            entry.epoch if entry is not None else 0,
            text,
            reasons.get(step.position, ""),
            str(facts.get("redrive_job", "")),
            str(facts.get("copy", "")),
            str(facts.get("original", "")),
        )


_SUFFIXES = {PayloadFormat.JSON: "json", PayloadFormat.TEXT: "txt"}


def file_suffix(payload: DecodedPayload, envelope: PrismEnvelope) -> str:
    """Return the file name extension of a payload, never one that a browser would open as a page."""
    if payload.format == PayloadFormat.ENCRYPTED or payload.text is None:
        return "bin"
    if envelope.metadata.content_encoding not in ("", "identity"):
        return "gz" if envelope.metadata.content_encoding == "gzip" else "bin"
    return _SUFFIXES.get(payload.format, "bin")
