"""The filter of a redrive job, and the changes that it makes to messages (RFC 7396 merge patches)."""

from typing import Any, Literal

import msgspec

from postroom.domain.arguments import (
    MAX_INT,
    check_any_text,
    check_int,
    check_optional_text,
    check_text,
    check_type,
)
from postroom.domain.envelope.headers import extension_bytes
from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import fingerprint
from postroom.domain.message import DEAD, IN_FLIGHT, READY, REPLACED, Message, Status
from postroom.domain.names import check_topic, message_stream
from postroom.domain.policy import MAX_DURATION_MS
from postroom.domain.search import BodyRules, EventFilter, FoundMessage, topic_matches

_Members = dict[str, msgspec.Raw]
_read_members = msgspec.json.Decoder(_Members).decode
_read_value = msgspec.json.Decoder(Any).decode
_write = msgspec.json.Encoder().encode
_NULL = b"null"
MAX_DEPTH = 100
"""Maximum depth of nested objects in a patch."""


def check_patch(patch: str) -> None:
    """Raise InvalidRequest unless a patch is a JSON object, with objects in it up to a depth."""
    try:
        _read_value(patch)  # validates all of it, which reading its members does not
        members = _read_members(patch)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        members = None
    if members is None or _depth(members) > MAX_DEPTH:
        raise InvalidRequest(
            f"The merge patch is no JSON object of up to {MAX_DEPTH} levels; give one such as "
            '{"customer": {"city": "Bonn"}, "obsolete": null}.'
        )


def apply_patch(payload: bytes, patch: str) -> bytes | None:
    """Return a payload after a patch that `check_patch` accepts; None if it is no JSON object."""
    try:
        _read_value(payload)
        members = _read_members(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _write(_merge(members, _read_members(patch)))


def _merge(target: _Members, patch: _Members) -> _Members:
    for name, value in patch.items():
        if bytes(value) == _NULL:
            target.pop(name, None)
            continue
        inner = _members(value)
        if inner is None:
            target[name] = value
        else:
            before = _members(target[name]) if name in target else None
            target[name] = msgspec.Raw(_write(_merge(before or {}, inner)))
    return target


def _members(value: msgspec.Raw) -> _Members | None:
    """Return the members of an object; None for any other value."""
    return _read_members(value) if bytes(value).startswith(b"{") else None


def _depth(members: _Members) -> int:
    return 1 + max((_depth(each) for value in members.values() if (each := _members(value))), default=0)


WaitingStatus = Literal["ready", "in_flight"]
"""Status of messages that wait; those that are delayed are ready."""
Action = Literal["redrive", "archive", "purge", "cancel", "reschedule"]
SkipReason = Literal[
    "settled",
    "redriven",
    "dead_again",
    "replaced",
    "key_taken",
    "unreadable",
    "not_an_object",
    "too_large",
    "dead",
    "in_flight",
    "ready",
    "expires_first",
]
"""Why a job left a message that matched as it is.

    settled: it was acked, removed or expired since. redriven: it is in its queue again. dead_again: it was
    redriven and dead-lettered again. replaced: another job sent a copy of it. key_taken: another message in
    the queue has its unique key. Of jobs that send copies: unreadable: its stored bytes can't be read.
    not_an_object: its payload is no JSON object. too_large: the copy would exceed a frame. Of jobs on waiting
    messages: dead: it became a dead letter. in_flight: it was delivered before it was rescheduled, or
    cancelled by a job on ready messages alone. ready: it was returned to its queue before it was cancelled by
    a job on messages in flight alone. expires_first: its time to live ends before it would be due.
"""

MAX_RATE = 1_000_000
MAX_MESSAGE_IDS = 1_000
MAX_VALUES = 100
MS = 1_000
MAX_EDIT_BYTES = 64 << 10
"""Maximum size of the headers that a job sets, names and values together, and of its patch."""
MAX_HEADER_NAME_CHARS = 255
_OF_DEAD_LETTERS = ("reasons", "fingerprints", "dead_since", "dead_until")
_LOG_FIELDS = ("principals", "correlation_id", "trace_id", "namespace", "headers", "text", "match")
_ALL_BODIES = BodyRules(topics=("*",))


class RedriveSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Selection of dead letters or waiting messages, and the action on each; criteria must all be met.

    Arguments:
        action: on dead letters, `redrive` returns them to their topic; `archive` and `purge` remove them for
            good, and differ in the reason that the log records. On messages that wait, `cancel` removes those
            that are ready, delayed or in flight, as `cancel_messages` does, and `reschedule` changes when
            those that are ready or delayed may be delivered.
        topics: names or globs; one must match.
        keys: sticky keys; the message must have one of them.
        statuses: statuses of messages that wait: `ready`, which includes delayed ones, or `in_flight`; empty
            for all that the action changes.
        reasons: of dead letters, such as `max_attempts`.
        fingerprints: of the errors of dead letters, 16 hex digits each.
        message_ids: only these messages, up to 1,000.
        dead_since, dead_until: when they were dead-lettered, ms since 1970 UTC, both inclusive.
        start_time, end_time, principals, correlation_id, trace_id, namespace, headers, text: as of
            `EventFilter`.
        match: words of headers and bodies, as of `EventFilter`, but the bodies of all topics are searched.
        rate: maximum messages a second; None for no limit.
        delay_ms: time until a redriven or rescheduled message may be delivered, counted from when the job
            changes it.
        at: when rescheduled messages may be delivered, ms since 1970 UTC, instead of `delay_ms`; a time in
            the past is now.
        note: why the messages are cancelled, for their history; up to 255 characters.
        limit: maximum number of messages; None for no limit.
        destination: topic of the same mailbox to which copies of the messages are sent, each with an id of
            its own; it exists or is created as by a send. None is their own topic.
        set_headers, remove_headers: custom headers to set on the copies, and names of headers to remove from
            them. A value of `base64:` followed by base64 is bytes.
        merge_patch: JSON object with which the payloads, which must be JSON objects, are merged (RFC 7396).

    A job with `destination`, `set_headers`, `remove_headers` or `merge_patch` sends copies. The originals
    stay, as dead letters with reason `replaced`; only a job whose `reasons` name it redrives them again.
    """

    action: Action = "redrive"
    topics: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()
    message_ids: tuple[str, ...] = ()
    dead_since: int | None = None
    dead_until: int | None = None
    start_time: int | None = None
    end_time: int | None = None
    principals: tuple[str, ...] = ()
    correlation_id: str | None = None
    trace_id: str | None = None
    namespace: str | None = None
    headers: dict[str, str] = {}
    text: str | None = None
    match: str | None = None
    rate: int | None = None
    delay_ms: int = 0
    limit: int | None = None
    destination: str | None = None
    set_headers: dict[str, str] = {}
    remove_headers: tuple[str, ...] = ()
    merge_patch: str | None = None
    keys: tuple[str, ...] = ()
    at: int | None = None
    note: str | None = None
    statuses: tuple[WaitingStatus, ...] = ()

    def validate(self) -> "RedriveSpec":
        """Return this specification.

        Raises: InvalidRequest naming the first field of a wrong type or out of bounds.
        """
        _check_types(self)
        for name in ("reasons", "fingerprints", "keys"):
            _check_count(name, getattr(self, name), MAX_VALUES)
        _check_count("message_ids", self.message_ids, MAX_MESSAGE_IDS)
        for id_ in self.message_ids:
            message_stream("", id_)
        for name in ("dead_since", "dead_until"):
            if (time := getattr(self, name)) is not None:
                check_int(f"Redrive {name}", time, -MAX_INT // MS, MAX_INT // MS)
        if self.rate is not None:
            check_int("Redrive rate", self.rate, 1, MAX_RATE)
        if self.limit is not None:
            check_int("Redrive limit", self.limit, 1)
        check_int("Redrive delay_ms", self.delay_ms, 0, MAX_DURATION_MS)
        if self.delay_ms and self.action not in ("redrive", "reschedule"):
            raise InvalidRequest(
                "Redrive delay_ms applies to redriven or rescheduled messages; leave it out of action "
                f"{self.action}."
            )
        self._check_waiting()
        self._check_copies()
        self.filter()
        return self

    @property
    def selects_waiting(self) -> bool:
        """Return whether the messages are not dead letters, but ready, delayed or in flight."""
        return self.action in ("cancel", "reschedule")

    @property
    def sends_copies(self) -> bool:
        """Return whether copies are sent in the place of the messages."""
        return self.destination is not None or self.is_edit

    @property
    def is_edit(self) -> bool:
        """Return whether the copies have other headers or payloads."""
        return bool(self.set_headers or self.remove_headers) or self.merge_patch is not None

    def _check_waiting(self) -> None:
        for name in _OF_DEAD_LETTERS if self.selects_waiting else ():
            if getattr(self, name) not in (None, ()):
                raise InvalidRequest(
                    f"Redrive {name} applies to dead letters; leave it out of action {self.action}, which "
                    "changes messages that wait."
                )
        for name, action in (("at", "reschedule"), ("note", "cancel")):
            if getattr(self, name) is not None and self.action != action:
                raise InvalidRequest(
                    f"Redrive {name} belongs to action {action}; leave it out of action {self.action}."
                )
        if self.statuses and not self.selects_waiting:
            raise InvalidRequest(
                f"Redrive statuses apply to messages that wait; leave them out of action {self.action}."
            )
        if self.action == "reschedule" and "in_flight" in self.statuses:
            raise InvalidRequest("Messages in flight can't be rescheduled; leave out the status in_flight.")
        check_optional_text("Redrive note", self.note)
        if self.at is not None:
            check_int("Redrive at", self.at, 0, MAX_INT // MS)
            if self.delay_ms:
                raise InvalidRequest("A redrive job reschedules to at or by delay_ms; leave out one of them.")

    def _check_copies(self) -> None:
        if self.sends_copies and self.action != "redrive":
            raise InvalidRequest(
                "A destination and edits apply to messages that are redriven; leave them out of action "
                f"{self.action}."
            )
        if self.destination is not None:
            check_topic(self.destination)
        _check_count("remove_headers", self.remove_headers, MAX_VALUES)
        for name in (*self.set_headers, *self.remove_headers):
            check_text("The name of a header", name, 1, MAX_HEADER_NAME_CHARS)
        if both := sorted({*self.set_headers} & {*self.remove_headers}):
            raise InvalidRequest(f"The redrive sets header {both[0]} and removes it; do one of them.")
        for name, text in self.set_headers.items():
            try:
                extension_bytes(text)
            except ValueError:
                raise InvalidRequest(f"The value of header {name} is not base64 after base64:.") from None
        size = sum(len(name.encode()) + len(text.encode()) for name, text in self.set_headers.items())
        if max(size, len((self.merge_patch or "").encode())) > MAX_EDIT_BYTES:
            raise InvalidRequest(
                f"The headers that a redrive sets, and its patch, have at most {MAX_EDIT_BYTES} bytes each."
            )
        if self.merge_patch is not None:
            check_patch(self.merge_patch)

    def filter(self) -> EventFilter:
        """Return the criteria about the messages as they were sent."""
        return EventFilter(
            start_time=self.start_time,
            end_time=self.end_time,
            topics=self.topics,
            principals=self.principals,
            correlation_id=self.correlation_id,
            trace_id=self.trace_id,
            namespace=self.namespace,
            headers=self.headers,
            text=self.text,
            match=self.match,
        )

    @property
    def needs_log(self) -> bool:
        """Return whether the selection depends on more than the state of the mailbox."""
        times = (self.start_time, self.end_time)
        return any(getattr(self, name) for name in _LOG_FIELDS) or times != (None, None)

    def covers_topic(self, topic: str) -> bool:
        """Return whether messages of a topic are selected."""
        return not self.topics or any(topic_matches(each, topic) for each in self.topics)

    def place_of(self, message: Message) -> int:
        """Return the position in the log by which a job orders its messages, and compares with its cut-off.

        A dead letter has the position of its dead-lettering. A message that waits has the position of its
        send, which no retry, delivery or rescheduling changes.
        """
        return message.position if self.selects_waiting else message.last

    def covers_status(self, status: Status) -> bool:
        """Return whether the action changes messages that wait with a status.

        Arguments:
            status: `ready`, which delayed messages have, too, or `in_flight`; others do not wait.
        """
        statuses = self.statuses or ("ready", "in_flight")
        if status == IN_FLIGHT:
            return self.action == "cancel" and "in_flight" in statuses
        return status == READY and "ready" in statuses

    def covers_state(self, message: Message) -> bool:
        """Return whether a message has the status that the action needs, and meets the criteria of its state.

        Its topic is not compared; see `covers_topic`.
        """
        if self.keys and message.sticky_key not in self.keys:
            return False
        if self.selects_waiting:
            return self.covers_status(message.status)
        at = message.changed_at
        return (
            message.status == DEAD
            and (self.action != "redrive" or message.reason != REPLACED or REPLACED in self.reasons)
            and (not self.reasons or message.reason in self.reasons)
            and (self.dead_since is None or at >= self.dead_since * MS)
            and (self.dead_until is None or at < (self.dead_until + 1) * MS)
            and (
                not self.fingerprints
                or fingerprint(message.reason or "", message.last_error) in self.fingerprints
            )
        )

    def covers_content(self, message: FoundMessage) -> bool:
        """Return whether a message meets the criteria about the message as it was sent."""
        return self.filter().matches(message, _ALL_BODIES)

    def streams(self, mailbox: str, topic: str) -> frozenset[bytes] | None:
        """Return the streams of the messages on a topic that are named; None if none is."""
        if not self.message_ids:
            return None
        return frozenset(
            message_stream(mailbox, id_, unique_in) for id_ in self.message_ids for unique_in in (None, topic)
        )


def is_dead(message: Message | None) -> bool:
    """Return whether a message is a dead letter."""
    return message is not None and message.status == DEAD


def _check_types(spec: RedriveSpec) -> None:
    """Raise InvalidRequest unless all fields have their types, and texts can be encoded."""
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    for name, value in fields.items():
        texts = [*value, *value.values()] if type(value) is dict else value
        for text in texts if type(texts) in (tuple, list) else [texts]:
            if isinstance(text, str):
                check_any_text(f"Redrive {name}", text)
    try:
        msgspec.convert(fields, RedriveSpec)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"The redrive specification is wrong: {error}.") from None


def _check_count(name: str, values: tuple[str, ...], maximum: int) -> None:
    if len(values) > maximum:
        raise InvalidRequest(f"The redrive has {len(values)} {name}; give at most {maximum}.")


def check_spec(spec: object) -> RedriveSpec:
    """Return a specification whose fields are valid, or raise InvalidRequest."""
    return check_type("The redrive specification", spec, RedriveSpec).validate()


def check_action(value: object) -> "JobAction":
    """Return an action of an operator on a job, or raise InvalidRequest."""
    if type(value) is str and value in JOB_ACTIONS:
        return value
    raise InvalidRequest(f"The action on a redrive job must be one of {', '.join(JOB_ACTIONS)}.")


JobAction = Literal["pause", "resume", "cancel", "undo"]
JOB_ACTIONS: tuple[JobAction, ...] = ("pause", "resume", "cancel", "undo")
