"""Labels of topics: text by name, which owners keep and do not interpret."""

from collections.abc import Mapping
from typing import Any

from postroom.domain.arguments import check_any_text, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_topic
from postroom.domain.policy import MAX_COUNT

MAX_LABELS = 200
"""Maximum number of labels of a topic."""
MAX_LABEL_CHARS = 4_096
"""Maximum length of the value of a label."""

Labels = Mapping[str, Mapping[str, str]]
"""Labels by topic."""
LabelChanges = Mapping[str, Mapping[str, str | None] | None]
"""Changes of labels by topic: None as a value removes the label; None as the labels of a topic removes them
all."""


def check_labels(labels: Any, most: int = MAX_COUNT) -> dict[str, dict[str, str | None] | None]:
    """Return labels or changes of them as plain mappings, which every transport can encode.

    Arguments:
        most: maximum number of topics.

    Raises: InvalidRequest naming the first topic, name or value of a wrong type or out of bounds.
    """
    checked: dict[str, dict[str, str | None] | None] = {}
    if len(check_type("labels", labels, dict)) > most:
        raise InvalidRequest(
            f"{len(labels)} topics have labels, and the limit is {most}; raise limits.topics."
        )
    for topic, values in labels.items():
        check_topic(topic)
        if values is not None and len(check_type(f"labels of {topic}", values, dict)) > MAX_LABELS:
            raise InvalidRequest(f"Topic {topic} may have up to {MAX_LABELS} labels; it had {len(values)}.")
        checked[topic] = None if values is None else dict(values)
        for name, value in (values or {}).items():
            check_text(f"A name in labels of {topic}", name, 1)
            text = "" if value is None else check_any_text(f"Label {name} of {topic}", value)
            if len(text) > MAX_LABEL_CHARS or "\0" in text:
                raise InvalidRequest(
                    f"Label {name} of {topic} may have up to {MAX_LABEL_CHARS} characters, none of them NUL."
                )
    return checked


def change_labels(labels: Labels, changes: LabelChanges) -> dict[str, dict[str, str]]:
    """Return labels after changes."""
    changed = {topic: dict(values) for topic, values in labels.items()}
    for topic, values in changes.items():
        merged = {} if values is None else {**changed.get(topic, {}), **values}
        changed[topic] = {name: value for name, value in merged.items() if value is not None}
    return {topic: values for topic, values in changed.items() if values}
