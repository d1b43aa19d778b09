"""Queues as topics: attributes of SQS are in the policy of the topic, or else in its labels."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from postroom.adapters.sqs.errors import SqsError, invalid_attribute, invalid_value, unsupported
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.names import is_glob
from postroom.domain.policy import DAY_MS, MAX_COUNT, MIN_VISIBILITY_MS, SECOND_MS, TopicPolicy
from postroom.domain.settings import MailboxSettings, PolicyChanges, SettingsChanges, resolve_policy

ACCOUNT: Final = "000000000000"
ARN: Final = f"arn:aws:sqs:us-east-1:{ACCOUNT}:"
FIFO: Final = ".fifo"
OWN: Final = "$sqs."
"""Prefix of labels and headers that Postroom sets; tags and message attributes of users can't have it."""
MAX_BYTES: Final = 1 << 20
DEDUPLICATION_MS: Final = 300_000
MAX_VISIBILITY_SECONDS: Final = 43_200
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
_RANGES = {
    "VisibilityTimeout": (0, MAX_VISIBILITY_SECONDS),
    "DelaySeconds": (0, 900),
    "MessageRetentionPeriod": (60, 1_209_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20),
    "MaximumMessageSize": (1_024, MAX_BYTES),
}
_DEFAULTS = {"DelaySeconds": "0", "ReceiveMessageWaitTimeSeconds": "0", "MaximumMessageSize": str(MAX_BYTES)}
_FIFO_DEFAULTS = {
    "ContentBasedDeduplication": "false",
    "DeduplicationScope": "queue",
    "FifoThroughputLimit": "perQueue",
}
_CHOICES = {
    "ContentBasedDeduplication": ("true", "false"),
    "DeduplicationScope": ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
}
_UNSUPPORTED = ("Policy", "KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled")
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)
READABLE = {
    *_RANGES,
    *_CHOICES,
    *_UNSUPPORTED,
    *_COUNTS,
    "All",
    "CreatedTimestamp",
    "LastModifiedTimestamp",
    "QueueArn",
    "RedrivePolicy",
    "RedriveAllowPolicy",
    "FifoQueue",
}
_NEW: dict[str, int | bool] = {
    "shards": 1,
    "shard_capacity": 1_000_000,
    "visibility_ms": 30 * SECOND_MS,
    "max_attempts": MAX_COUNT,
    "replay_window_ms": DEDUPLICATION_MS,
    "ready_retention_ms": 4 * DAY_MS,
    "in_flight_retention_visibilities": MAX_VISIBILITY_SECONDS * SECOND_MS // MIN_VISIBILITY_MS,
}
"""Policy of a new queue."""


class Queue(NamedTuple):
    """A topic that has a section or labels of its own."""

    name: str
    policy: TopicPolicy
    labels: Mapping[str, str]

    @property
    def is_fifo(self) -> bool:
        """Return whether it is a FIFO queue, by its name."""
        return self.name.endswith(FIFO)

    @property
    def tags(self) -> dict[str, str]:
        """Return its tags."""
        return {name: value for name, value in self.labels.items() if not name.startswith(OWN)}

    def attribute(self, name: str) -> str:
        """Return an attribute that labels have, or its default; "" without one.

        Others can set any label, so one whose value `SetQueueAttributes` would refuse is ignored.
        """
        default = _DEFAULTS.get(name) or (_FIFO_DEFAULTS.get(name, "") if self.is_fifo else "")
        value = self.labels.get(OWN + name)
        if value is None:
            return default
        try:
            read_attributes(self.name, {name: value})
        except SqsError:
            return default
        return value

    def number(self, name: str) -> int:
        """Return an attribute that is a number."""
        return int(self.attribute(name))

    @property
    def visibility_ms(self) -> int:
        """Return its visibility timeout; the policy of a FIFO queue can't have a long one."""
        seconds = self.attribute("VisibilityTimeout")
        return int(seconds) * SECOND_MS if seconds else self.policy.visibility_ms

    @property
    def dead_letter_queue(self) -> str | None:
        """Return the name of its dead-letter queue."""
        name = self.labels.get(OWN + "deadLetterQueue")
        return name if name is not None and _may_take_dead_letters(name, self.name) else None

    def describe(self) -> dict[str, str]:
        """Return its attributes besides counts."""
        policy = self.policy
        values = {
            "VisibilityTimeout": str(self.visibility_ms // SECOND_MS),
            "MessageRetentionPeriod": str(policy.ready_retention_ms // SECOND_MS),
            **{name: self.attribute(name) for name in _DEFAULTS},
            "CreatedTimestamp": self._time("created"),
            "LastModifiedTimestamp": self._time("modified"),
            "QueueArn": ARN + self.name,
            "SqsManagedSseEnabled": "false",
        }
        if self.dead_letter_queue is not None:
            redrive = {
                "deadLetterTargetArn": ARN + self.dead_letter_queue,
                "maxReceiveCount": policy.max_attempts,
            }
            values["RedrivePolicy"] = json.dumps(redrive)
        if allow := self.attribute("RedriveAllowPolicy"):
            values["RedriveAllowPolicy"] = allow
        if self.is_fifo:
            values |= {"FifoQueue": "true"} | {name: self.attribute(name) for name in _FIFO_DEFAULTS}
        return values

    def _time(self, name: str) -> str:
        value = self.labels.get(OWN + name, "")
        return value if value.isascii() and value.isdecimal() else "0"


def _may_take_dead_letters(target: str, source: str) -> bool:
    return target not in ("", source) and target.endswith(FIFO) == source.endswith(FIFO)


def find_queue(settings: MailboxSettings, name: str) -> Queue:
    """Return a queue; raise SqsError when the mailbox has none with this name."""
    if name not in settings.labels and (name not in settings.topics or is_glob(name)):
        raise SqsError("QueueDoesNotExist", "The specified queue does not exist.")
    return Queue(name, resolve_policy(settings, name), settings.labels.get(name, {}))


def list_queues(settings: MailboxSettings) -> list[Queue]:
    """Return all queues, sorted by name."""
    names = {*settings.labels, *(each for each in settings.topics if not is_glob(each))}
    return [find_queue(settings, each) for each in sorted(names)]


def check_name(name: str) -> None:
    """Raise SqsError unless a new queue may have this name."""
    if not _NAME.fullmatch(name):
        raise invalid_value(
            "QueueName",
            name,
            "Can only include alphanumeric characters, hyphens, or underscores, 1 to 80 in length; the name "
            "of a FIFO queue ends with .fifo.",
        )


def count_attributes(summary: TopicSummary | None) -> dict[str, str]:
    """Return the counts of a queue."""
    numbers = (0, 0, 0) if summary is None else (summary.ready, summary.in_flight, summary.delayed)
    return dict(zip(_COUNTS, map(str, numbers), strict=True))


def name_of(arn: object, parameter: str) -> str:
    """Return the queue of an ARN."""
    parts = arn.split(":") if isinstance(arn, str) else []
    if len(parts) != 6 or parts[:3] != ["arn", "aws", "sqs"] or not parts[5]:
        raise invalid_value(parameter, arn, "It must be the ARN of a queue, such as arn:aws:sqs:...:name.")
    return parts[5]


def new_queue(name: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> SettingsChanges:
    """Return the change of settings that creates a queue."""
    is_fifo = name.endswith(FIFO)
    if attributes.get("FifoQueue") not in (("true",) if is_fifo else (None,)):
        raise invalid_attribute("FifoQueue", "It is true for a name with .fifo at its end, and absent else.")
    order = {"ordered_keys": True, "key_batch": 10} if is_fifo else {"fair_keys": True}
    section, labels = read_attributes(name, {k: v for k, v in attributes.items() if k != "FifoQueue"})
    now = str(int(time.time()))
    own = {OWN + "created": now, OWN + "modified": now}
    return SettingsChanges(
        topics={name: {**_NEW, **order, **section}}, labels={name: {**tags, **own, **labels}}
    )


def change_queue(queue: Queue, attributes: Mapping[str, str]) -> SettingsChanges:
    """Return the change of settings that changes attributes of a queue."""
    section, labels = read_attributes(queue.name, attributes)
    labels[OWN + "modified"] = str(int(time.time()))
    return SettingsChanges(topics={queue.name: section} if section else {}, labels={queue.name: labels})


def read_attributes(name: str, attributes: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the fields of the policy, and the labels, that carry attributes of a queue.

    Raises: SqsError naming the first attribute that is unknown, not permitted or out of range.
    """
    is_fifo = name.endswith(FIFO)
    section: PolicyChanges = {}
    labels: dict[str, str | None] = {}
    for attribute, value in attributes.items():
        if attribute in _RANGES:
            fields, labels[OWN + attribute] = _number(attribute, value, is_fifo=is_fifo)
            section = {**section, **fields}
        elif attribute in _CHOICES and is_fifo:
            if value not in _CHOICES[attribute]:
                raise invalid_attribute(attribute, f"It is one of {', '.join(_CHOICES[attribute])}.")
            labels[OWN + attribute] = value
        elif attribute == "RedrivePolicy":
            target, most = _redrive_policy(value)
            section = {**section, "max_attempts": most}
            labels[OWN + "deadLetterQueue"] = target
            if target is not None and not _may_take_dead_letters(target, name):
                raise invalid_attribute(
                    attribute, "A dead-letter queue is another queue, of the same kind as its source."
                )
        elif attribute == "RedriveAllowPolicy":
            labels[OWN + attribute] = _redrive_allow_policy(value)
        elif attribute in _UNSUPPORTED:
            if value not in ("", "false"):
                raise unsupported(
                    f"The attribute {attribute} is not supported; capabilities decide on access."
                )
        else:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {attribute}.")
    return {**section}, labels


def _number(name: str, value: str, *, is_fifo: bool) -> tuple[dict[str, Any], str | None]:
    least, most = _RANGES[name]
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else -1
    if not least <= number <= most:
        raise invalid_attribute(name, f"It is a number from {least} to {most}.")
    if name == "MessageRetentionPeriod":
        return {"ready_retention_ms": number * SECOND_MS}, None
    if name != "VisibilityTimeout":
        return {}, str(number)
    visibility_ms = max(number * SECOND_MS, MIN_VISIBILITY_MS)
    if not is_fifo:
        window = max(DEDUPLICATION_MS, 2 * visibility_ms)
        return {"visibility_ms": visibility_ms, "replay_window_ms": window}, None
    # A longer timeout would lengthen the window of deduplication ids.
    longest = DEDUPLICATION_MS // 2
    is_longer = visibility_ms > longest
    return {"visibility_ms": min(visibility_ms, longest)}, str(number) if is_longer else None


def _redrive_policy(value: str) -> tuple[str | None, int]:
    if not value:
        return None, MAX_COUNT
    policy = _object("RedrivePolicy", value)
    most = policy.get("maxReceiveCount")
    if isinstance(most, str) and most.isascii() and most.isdecimal() and len(most) < 10:
        most = int(most)
    if policy.keys() != {"deadLetterTargetArn", "maxReceiveCount"} or type(most) is not int:
        raise invalid_attribute("RedrivePolicy", "It has a deadLetterTargetArn and a maxReceiveCount.")
    if not 1 <= most <= 1_000:
        raise invalid_attribute("RedrivePolicy", "maxReceiveCount is a number from 1 to 1000.")
    return name_of(policy["deadLetterTargetArn"], "RedrivePolicy"), most


def _redrive_allow_policy(value: str) -> str | None:
    if not value:
        return None
    policy = _object("RedriveAllowPolicy", value)
    permission, arns = policy.get("redrivePermission"), policy.get("sourceQueueArns")
    is_by_queue = permission == "byQueue"
    if permission not in ("allowAll", "denyAll", "byQueue") or is_by_queue != (arns is not None):
        raise invalid_attribute("RedriveAllowPolicy", "redrivePermission is allowAll, denyAll or byQueue.")
    if is_by_queue and not (isinstance(arns, list) and 1 <= len(arns) <= 10):
        raise invalid_attribute("RedriveAllowPolicy", "sourceQueueArns has up to 10 ARNs.")
    for each in arns or ():
        name_of(each, "RedriveAllowPolicy")
    return value


def _object(name: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_attribute(name, "It is a JSON object.")
    return parsed


def permits(target: Queue, source: str) -> bool:
    """Return whether a dead-letter queue lets a queue use it."""
    if OWN + "RedriveAllowPolicy" not in target.labels:
        return True
    if not (allow := target.attribute("RedriveAllowPolicy")):
        return False  # another client set the label to an invalid value
    policy = json.loads(allow)
    if policy["redrivePermission"] == "byQueue":
        return source in [name_of(each, "RedriveAllowPolicy") for each in policy["sourceQueueArns"]]
    return bool(policy["redrivePermission"] == "allowAll")
