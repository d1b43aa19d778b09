"""Settings of a mailbox: its limits, and the policies of its topics by section (ADR 0098)."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import msgspec

from postroom.domain.arguments import check_text, check_type
from postroom.domain.errors import Difference, InvalidRequest, SettingsConflict
from postroom.domain.labels import LabelChanges, Labels, change_labels, check_labels
from postroom.domain.names import check_topic_pattern, glob_specificity, is_glob, may_overlap
from postroom.domain.policy import MailboxLimits, PolicyValue, TopicPolicy
from postroom.domain.saved_search import Searches
from postroom.domain.search import topic_matches
from postroom.domain.subject import SubjectPolicy, check_subject_policies

Struct = TypeVar("Struct", TopicPolicy, MailboxLimits)
Section = Mapping[str, PolicyValue]
"""Fields of a topic policy that a section sets."""

PolicyChanges = Mapping[str, PolicyValue | None]
"""Fields of a topic policy that a change sets; None removes the field from the topic's section."""

DEFAULT = "policy"
"""Name of the section of all topics: `[policy]` of a settings file."""
MAX_GLOBS = 50
"""Sections with a `*`; those that may match the same topic are checked together."""
_DEPENDENT = (
    ("visibility_ms", "replay_window_ms"),
    ("backoff_base_ms", "backoff_max_ms"),
    ("priorities", "priority_aging_ms", "ready_retention_ms"),
    ("ordered_keys", "dead_letters_hold_keys", "key_batch"),
    ("fair_keys", "max_in_flight_per_key", "rate_per_key"),
    ("fair_keys", "key_weights"),
)
"""Fields that `TopicPolicy.validate` compares with each other."""


class MailboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a mailbox, whoever owns it; changes are events in its log.

    Arguments:
        limits: of the mailbox and its commands.
        default_policy: of topics, unless a section changes it.
        topics: sections, by the name of a topic or a glob such as `payments.*` (see `topic_matches`).
        subject_policies: encryption of the messages of data subjects, by topic; see `SubjectPolicy`.
        labels: text by name, by topic, which owners do not interpret.
        searches: saved searches by id, which owners do not interpret; see `saved_searches`. `save_search`
            changes them. Left out of the log while it is empty, as former versions refuse unknown fields.
    """

    limits: MailboxLimits = MailboxLimits()
    default_policy: TopicPolicy = TopicPolicy()
    topics: Mapping[str, Section] = {}
    subject_policies: Mapping[str, SubjectPolicy] = {}
    labels: Labels = {}
    searches: Searches | msgspec.UnsetType = msgspec.UNSET

    @property
    def saved_searches(self) -> Searches:
        """Return the saved searches by id."""
        return {} if self.searches is msgspec.UNSET else self.searches

    def with_searches(self, searches: Searches) -> "MailboxSettings":
        """Return these settings with other saved searches, or none.

        Arguments:
            searches: by their ids.
        """
        return msgspec.structs.replace(self, searches=searches or msgspec.UNSET)

    def validate(self) -> "MailboxSettings":
        """Return these settings.

        Raises: InvalidRequest naming the first field of a wrong type or out of bounds, alone or together with
            other sections that match the same topic.
        """
        check_type("limits", self.limits, MailboxLimits).validate()
        check_type("default_policy", self.default_policy, TopicPolicy).validate()
        for pattern, section in self.topics.items():
            check_topic_pattern(pattern)
            if not isinstance(section, Mapping):
                raise InvalidRequest(f"The section of topic {pattern} must be a mapping of fields.")
            _check_names(section, TopicPolicy, f"The section of topic {pattern}")
        _check_sections(self)
        if self.subject_policies:
            check_subject_policies(self.subject_policies)
        check_labels(self.labels, self.limits.topics)
        return self


class SettingsChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a mailbox's settings; fields that they leave out stay as they are.

    Arguments:
        limits, default_policy: values by the name of the field.
        topics: values by the name of the field, by topic or glob. None in place of a value removes the field
            from the section, and None in place of the fields removes the section.
        subject_policies: by topic; None removes one.
        labels: by topic; None removes one label, or all of a topic.
    """

    limits: Mapping[str, int | None] = {}
    default_policy: Section = {}
    topics: Mapping[str, PolicyChanges | None] = {}
    subject_policies: Mapping[str, SubjectPolicy | None] = {}
    labels: LabelChanges = {}

    @classmethod
    def of(
        cls,
        limits: MailboxLimits | None = None,
        default_policy: TopicPolicy | None = None,
        subject_policies: Mapping[str, SubjectPolicy] | None = None,
    ) -> "SettingsChanges":
        """Return the changes to these values; None changes nothing.

        Arguments:
            limits: of the mailbox and its commands.
            default_policy: of topics.
            subject_policies: encryption, by topic.
        """
        return cls(
            {} if limits is None else msgspec.structs.asdict(limits),
            {} if default_policy is None else msgspec.structs.asdict(default_policy),
            subject_policies=subject_policies or {},
        )


UNCHANGED = SettingsChanges()


class Resolved(NamedTuple):
    """A field of a topic's policy, and the section that sets it; `DEFAULT` if none does."""

    value: PolicyValue
    section: str


def change_settings(settings: MailboxSettings, changes: SettingsChanges) -> MailboxSettings:
    """Return the settings after changes.

    Raises: InvalidRequest as `MailboxSettings.validate`, and for an unknown field.
    """
    checked = check_changes(changes)
    topics = {name: dict(section) for name, section in settings.topics.items()}
    for pattern, fields in checked.topics.items():
        section = topics.setdefault(pattern, {})
        if fields is None:
            section.clear()
            continue
        for name, value in fields.items():
            if value is None:
                section.pop(name, None)
            else:
                section[name] = value
    subjects = {**settings.subject_policies, **checked.subject_policies}
    return MailboxSettings(
        _replace(settings.limits, checked.limits, "limits"),
        _replace(settings.default_policy, checked.default_policy, "default_policy"),
        {pattern: section for pattern, section in topics.items() if section},
        {topic: policy for topic, policy in subjects.items() if policy is not None},
        change_labels(settings.labels, checked.labels),
        settings.searches,
    ).validate()


def check_changes(changes: SettingsChanges) -> SettingsChanges:
    """Return changes as plain mappings of the right types, which every transport can encode.

    The owner decides on names and bounds, as another version may know others.

    Raises: InvalidRequest naming the first mapping, name or value of a wrong type.
    """
    check_type("changes", changes, SettingsChanges)
    return SettingsChanges(
        _check_values("limits", changes.limits),
        _check_values("default_policy", changes.default_policy),
        {
            check_topic_pattern(pattern): None
            if fields is None
            else _check_values(f"The section of topic {pattern}", fields)
            for pattern, fields in _check_mapping("topics", changes.topics).items()
        },
        {
            check_text("A topic that is encrypted", topic): None
            if policy is None
            else check_type(f"The policy of topic {topic}", policy, SubjectPolicy).validate(topic)
            for topic, policy in _check_mapping("subject_policies", changes.subject_policies).items()
        },
        check_labels(changes.labels),
    )


def check_policy_changes(policy: TopicPolicy | PolicyChanges) -> dict[str, PolicyValue | None]:
    """Return the fields that a policy of a topic sets: all of a `TopicPolicy`, or the keys of a mapping.

    Raises: InvalidRequest for a policy out of bounds, and a mapping with a name or value of a wrong type.
    """
    if isinstance(policy, TopicPolicy):
        policy = msgspec.structs.asdict(policy.validate())
    if not isinstance(policy, Mapping):
        raise InvalidRequest(
            f"policy must be a TopicPolicy, or a mapping of the fields to set, not {type(policy).__name__}."
        )
    return _check_values("policy", policy)


def changed_settings(before: SettingsChanges, after: SettingsChanges) -> SettingsChanges:
    """Return the changes of `after` that `before` lacks, or has with other values."""
    return SettingsChanges(
        {name: value for name, value in after.limits.items() if before.limits.get(name, ...) != value},
        {
            name: value
            for name, value in after.default_policy.items()
            if before.default_policy.get(name) != value
        },
        topics={
            pattern: {**dict.fromkeys(before.topics.get(pattern) or ()), **(fields or {})}
            for pattern, fields in after.topics.items()
            if before.topics.get(pattern) != fields
        },
    )


def resolve_policy(settings: MailboxSettings, topic: str) -> TopicPolicy:
    """Return the policy of a topic: the default, changed by the sections that match, in their order."""
    fields = {name: value for _, section in sections_of(settings, topic) for name, value in section.items()}
    return msgspec.structs.replace(settings.default_policy, **fields) if fields else settings.default_policy


def explain_policy(settings: MailboxSettings, topic: str) -> dict[str, Resolved]:
    """Return each field of a topic's policy with the section that sets it."""
    resolved = {
        name: Resolved(value, DEFAULT)
        for name, value in msgspec.structs.asdict(settings.default_policy).items()
    }
    for pattern, section in sections_of(settings, topic):
        resolved |= {name: Resolved(value, pattern) for name, value in section.items()}
    return resolved


def shared_limits_of(settings: MailboxSettings, topic: str) -> str:
    """Return the section whose limits a topic with `shared_limits` shares with others."""
    names = [name for name, section in sections_of(settings, topic) if "shared_limits" in section]
    return names[-1] if names else DEFAULT


def sections_of(settings: MailboxSettings, topic: str) -> list[tuple[str, Section]]:
    """Return the sections that match a topic, the most specific one last.

    A glob is the more specific the more characters it has besides `*`; of two with as many, the later one by
    name counts as more specific. The section of the topic itself is the most specific of all.
    """
    if not settings.topics:
        return []
    globs = [each for each in settings.topics if is_glob(each) and topic_matches(each, topic)]
    names = sorted(globs, key=glob_specificity)
    if topic in settings.topics:
        names.append(topic)
    return [(name, settings.topics[name]) for name in names]


def list_settings(settings: MailboxSettings) -> dict[str, object]:
    """Return the value of each setting by its name, such as `policy.max_attempts`."""
    values: dict[str, object] = {}
    for prefix, fields in (("limits", settings.limits), (DEFAULT, settings.default_policy)):
        values |= {f"{prefix}.{name}": value for name, value in msgspec.structs.asdict(fields).items()}
    for pattern, section in settings.topics.items():
        values |= {f"topics.{pattern}.{name}": value for name, value in section.items()}
    for topic, labels in settings.labels.items():
        values |= {f"labels.{topic}.{name}": value for name, value in labels.items()}
    return values | {
        f"erasure.topics.{topic}": _shown(policy) for topic, policy in settings.subject_policies.items()
    }


def compare_settings(before: MailboxSettings, after: MailboxSettings) -> list[Difference]:
    """Return the settings that differ; the value of a setting that one of them lacks is None."""
    old, new = list_settings(before), list_settings(after)
    names = (*old, *(name for name in new if name not in old))
    return [
        Difference(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)
    ]


def check_settings(mailbox: str, stored: MailboxSettings, settings: SettingsChanges) -> None:
    """Check that a mailbox has the settings with which a process opens it.

    Fields of a topic's section are compared with the policy in force, fields of a glob with the section.

    Raises: SettingsConflict naming each difference.
    """
    if differences := tuple(_differences(stored, settings)):
        raise SettingsConflict(mailbox, differences)


_FORMER_DEFAULTS = {("limits.topics", 1_024, MailboxLimits().topics)}
"""Former and present defaults of settings: owners with the present default may open mailboxes with the
former."""


def _differences(stored: MailboxSettings, settings: SettingsChanges) -> Iterator[Difference]:
    for prefix, current, values in (
        ("limits", stored.limits, settings.limits),
        (DEFAULT, stored.default_policy, settings.default_policy),
    ):
        for name, value in values.items():
            stated = getattr(current, name)
            if stated != value and (f"{prefix}.{name}", stated, value) not in _FORMER_DEFAULTS:
                yield Difference(f"{prefix}.{name}", stated, value)
    for pattern, fields in settings.topics.items():
        in_force = stored.topics.get(pattern, {})
        if not is_glob(pattern):
            in_force = msgspec.structs.asdict(resolve_policy(stored, pattern))
        for name, field in (fields or {}).items():
            if field is not None and in_force.get(name) != field:
                yield Difference(f"topics.{pattern}.{name}", in_force.get(name), field)
    for topic, subject in settings.subject_policies.items():
        current_subject = stored.subject_policies.get(topic)
        if current_subject != subject:
            yield Difference(f"erasure.topics.{topic}", _shown(current_subject), _shown(subject))


def _shown(policy: SubjectPolicy | None) -> str | None:
    return None if policy is None else " ".join((policy.subject, *policy.encrypt))


def _replace(values: Struct, changes: PolicyChanges, where: str) -> Struct:
    _check_names(changes, type(values), where)
    return msgspec.structs.replace(values, **changes)


def _check_mapping(name: str, values: object) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"{name} must be a mapping, not of type {type(values).__name__}.")
    return values


def _check_values(where: str, values: object) -> dict[str, Any]:
    """Return the values of fields, which are numbers, booleans, mappings of numbers, or None."""
    return {
        check_text("The name of a field", name): _check_value(f"{name[:80]} of {where}", value)
        for name, value in _check_mapping(where, values).items()
    }


def _check_value(name: str, value: object) -> PolicyValue | None:
    if value is None or type(value) is bool:
        return value
    if isinstance(value, Mapping):
        return {
            check_text(f"A key of {name}", key): check_type(f"{key[:80]!r} of {name}", weight, int)
            for key, weight in value.items()
        }
    return check_type(name, value, int)


def _check_names(values: Mapping[str, object], kind: type[msgspec.Struct], where: str) -> None:
    fields = kind.__struct_fields__
    for name in values:
        if check_text("The name of a field", name) not in fields:
            close = get_close_matches(name, fields, 1)
            choices = f"did you mean {close[0]}?" if close else f"it has {', '.join(fields)}."
            raise InvalidRequest(f"{where} has no field {name[:80]!r}; {choices}")


def _check_sections(settings: MailboxSettings) -> None:
    globs = sorted(filter(is_glob, settings.topics), key=glob_specificity)
    topics = [each for each in settings.topics if not is_glob(each)]
    if len(globs) > MAX_GLOBS:
        raise InvalidRequest(f"There are sections for {len(globs)} globs of topics; use at most {MAX_GLOBS}.")
    if len(topics) > settings.limits.topics:
        raise InvalidRequest(
            f"There are sections for {len(topics)} topics, and the limit is {settings.limits.topics}; use "
            "globs, or raise limits.topics."
        )
    for pattern in globs:
        _check_policy(settings, (pattern,))
    for fields in _DEPENDENT:
        relevant = [each for each in globs if not settings.topics[each].keys().isdisjoint(fields)]
        for count in range(2, len(fields) + 1):
            for some in combinations(relevant, count):
                if all(may_overlap(one, other) for one, other in combinations(some, 2)):
                    _check_policy(settings, some)
    for topic in topics:
        _check_policy(settings, tuple(name for name, _ in sections_of(settings, topic)))


def _check_policy(settings: MailboxSettings, sections: tuple[str, ...]) -> None:
    fields: dict[str, PolicyValue] = {}
    for each in sections:
        fields |= settings.topics[each]
    try:
        msgspec.structs.replace(settings.default_policy, **fields).validate()
    except InvalidRequest as error:
        names = " and ".join(f'[topics."{each}"]' for each in sections)
        raise InvalidRequest(f"{names}: {error}") from error
