"""The editor of a topic's policy, which shows what a change would do before it is made."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from starlette.responses import Response

from postroom.adapters.console.page import Page, route
from postroom.adapters.console.values import parse_number, split_pairs
from postroom.application.queries.preview_settings import describe_effect
from postroom.application.reports import TopicReport
from postroom.domain.errors import Forbidden, InvalidRequest, show_setting
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.names import check_topic
from postroom.domain.policy import PolicyValue, TopicPolicy
from postroom.domain.settings import DEFAULT, SettingsChanges, explain_policy

RETRIES: Final = ("max_attempts", "backoff_base_ms", "backoff_max_ms", "visibility_ms")
"""Fields of which the what-if page simulates other values."""


class Field(NamedTuple):
    """A field of a policy in the form.

    Arguments:
        value: the value that the section of the topic sets, as text; empty if it sets none.
        current: the value in force, as text.
        section: the section that sets the value in force.
        kind: `number`, `flag` or `weights`.
    """

    name: str
    value: str
    current: str
    section: str
    kind: str
    is_time: bool


class Change(NamedTuple):
    """A field of a policy before and after a change; `after` is None if it is hidden from the caller."""

    name: str
    before: str
    after: str | None
    section: str


async def edit_policy(page: Page) -> Response:
    """Show the form of a topic's policy."""
    report = await page.mailbox.describe_topic(check_topic(page.query.get("name", "")))
    return await _policy_form(page, report)


async def change_policy(page: Page) -> Response:
    """Show what a change of a topic's policy would do; with a confirmation, make it."""
    name = check_topic(page.field("name"))
    report = await page.mailbox.describe_topic(name)
    values = {each: page.field(each) for each in TopicPolicy.__struct_fields__}
    if page.field("change"):
        return await _policy_form(page, report, values)
    try:
        changes = _read_changes(report, values)
        if not changes:
            return await _policy_form(page, report, values, "Nothing is changed; change a field first.", 400)
        if page.field("confirmed") == "1":
            await page.mailbox.set_topic_policy(name, changes)
            return page.redirect(
                "/topics/show", f"The policy of {name} is changed; it applies from now on.", name=name
            )
        preview = await _preview(page, name, changes)
    except InvalidRequest as error:
        return await _policy_form(page, report, values, str(error), error.status)
    return await page.render(
        "topics/policy_preview",
        name=name,
        changes=_compare(report, changes, preview),
        effects=None
        if preview is None
        else [(each in preview.losses, describe_effect(each)) for each in preview.effects],
        fields=[("name", name), *((each, value) for each, value in values.items() if value)],
        simulation=_simulation(page, name, report, changes),
    )


async def _preview(
    page: Page, name: str, changes: Mapping[str, PolicyValue | None]
) -> SettingsPreview | None:
    """Return the effects of a change; None if the caller may not see the settings of the mailbox."""
    try:
        return await page.mailbox.preview_settings(SettingsChanges(topics={name: changes}))
    except Forbidden:
        return None


async def _policy_form(
    page: Page,
    report: TopicReport,
    values: Mapping[str, str] | None = None,
    error: str = "",
    status: int = 200,
) -> Response:
    return await page.render(
        "topics/policy",
        status,
        topic=report.summary.topic,
        fields=[
            each if values is None else each._replace(value=values[each.name]) for each in fields_of(report)
        ],
        error=error,
    )


def fields_of(report: TopicReport) -> list[Field]:
    """Return the fields of the policy of a topic."""
    topic, policy = report.summary.topic, report.policy
    fields = []
    for name in TopicPolicy.__struct_fields__:
        value = getattr(policy, name)
        kind = "flag" if isinstance(value, bool) else "weights" if isinstance(value, Mapping) else "number"
        section = report.sections.get(name, DEFAULT)
        text = _write(value)
        own = text if section == topic else ""
        fields.append(Field(name, own, text, section, kind, name.endswith("_ms")))
    return fields


def _write(value: PolicyValue) -> str:
    """Return the value of a field as the form has it."""
    if isinstance(value, Mapping):
        return "\n".join(f"{key}={weight}" for key, weight in value.items())
    return show_setting(value)


def _read_changes(report: TopicReport, values: Mapping[str, str]) -> dict[str, PolicyValue | None]:
    """Return the fields that a form changes, with None for a field that it leaves to other sections."""
    changes: dict[str, PolicyValue | None] = {}
    for field in fields_of(report):
        text = values[field.name].replace("\r\n", "\n").strip()
        if text == field.value.strip():
            continue
        changes[field.name] = None if not text else _read_value(field, text)
    return changes


def _read_value(field: Field, text: str) -> PolicyValue:
    if field.kind == "flag":
        if text not in ("true", "false"):
            raise InvalidRequest(f"{field.name} is {text[:40]!r}; choose true or false.")
        return text == "true"
    if field.kind == "weights":
        pairs = split_pairs(field.name, text).items()
        return {key: parse_number(f"The weight of {key[:40]}", value) or 0 for key, value in pairs}
    return parse_number(field.name, text) or 0


def _compare(
    report: TopicReport, changes: Mapping[str, PolicyValue | None], preview: SettingsPreview | None
) -> list[Change]:
    topic = report.summary.topic
    explained = {} if preview is None else explain_policy(preview.after, topic)
    rows = []
    for name, value in changes.items():
        after, section = explained.get(name, (value, topic))
        text = None if after is None else _write(after)
        rows.append(Change(name, _write(getattr(report.policy, name)), text, section))
    return rows


def _simulation(
    page: Page, name: str, report: TopicReport, changes: Mapping[str, PolicyValue | None]
) -> str | None:
    """Return the link to a simulation of the change with past messages, or None if it changes no retries."""
    values = {each: changes[each] for each in RETRIES if changes.get(each) is not None}
    if not values or page.data.log is None:
        return None
    return page.url("/what-if", topic=name, events=5_000, **values)


ROUTES: Final = [
    route("/topics/policy", edit_policy, query=("name",)),
    route("/topics/policy", change_policy, method="POST"),
]
