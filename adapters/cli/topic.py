"""Commands for topics: policies, pausing, purging, and simulation of policies."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.output import Time
from postroom.adapters.cli.remote import read_reports, read_store, use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import parse_fields
from postroom.adapters.cli.values import (
    NOTHING,
    REFUSED,
    Archive,
    WrongUsage,
    Yes,
    format_duration,
    parse_duration,
    parse_moment,
    parse_pairs,
)
from postroom.application.text import pluralize
from postroom.domain.errors import Forbidden, InvalidRequest, show_setting
from postroom.domain.names import describe_choices
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges, explain_policy

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.queries.simulate_policy import Comparison
    from postroom.application.reports import ConsumerReport
    from postroom.domain.mailbox.counts import TopicSummary


Topic = Annotated[str, Argument(help="Topic.")]


def list_topics(session: Session) -> None:
    """List the topics of a mailbox: messages by status, paused or not, and what their policies change."""
    topics = read_store(session, lambda mailbox: mailbox.list_topics())
    default = read_store(session, lambda mailbox: mailbox.get_settings()).default_policy
    if session.out.as_json:
        facts = {"mailbox": session.mailbox, "default_policy": default, "topics": topics}
        session.out.json(facts | {"dlq_profile": "durable"})
        return
    session.out.table(
        ("topic", "ready", "delayed", "in flight", "dead", "oldest", "paused", "policy"),
        [
            (
                each.topic,
                each.ready,
                each.delayed,
                each.in_flight,
                each.dead,
                None if each.oldest_at is None else Time(each.oldest_at),
                "paused" if each.paused else None,
                ", ".join(_changes(each.policy, default)) or "default",
            )
            for each in topics
        ],
    )


async def show(session: Session, topic: Topic) -> None:
    """Show a topic: its messages by status, rates and latencies, keys, and consumers."""
    _, report = await read_reports(session, lambda mailbox: mailbox.describe_topic(topic))
    if session.out.as_json:
        session.out.json(report)
        return
    summary = report.summary
    session.out.facts(
        [
            ("topic", topic + (", paused" if summary.paused else "")),
            ("ready", f"{summary.ready:,}"),
            ("delayed", f"{summary.delayed:,}"),
            ("in flight", f"{summary.in_flight:,}"),
            ("dead letters", f"{summary.dead:,}"),
            ("oldest", None if summary.oldest_at is None else Time(summary.oldest_at)),
            ("receivers waiting", f"{summary.receivers:,}"),
            ("subscriptions", ", ".join(report.subscriptions)),
        ]
    )
    session.out.line()
    session.out.table(
        ("messages sent in", "sent", "per second", "acked", "failed", "dead", "queue p95", "total p95"),
        [
            (
                format_duration(each.period_ms),
                each.sent,
                f"{each.sent / max(each.seconds, 1):.2f}",
                each.acked,
                each.failed,
                each.dead,
                None if each.queue_p95_ms is None else format_duration(each.queue_p95_ms),
                None if each.total_p95_ms is None else format_duration(each.total_p95_ms),
            )
            for each in report.periods
        ],
    )
    if cut := [each for each in report.periods if not each.is_whole]:
        session.out.prose(
            f"Only the latest {report.events:,} events of the log were read, since {cut[0].since}."
        )
    if report.keys:
        session.out.line()
        session.out.table(
            ("key", "waiting", "in flight", "waits for"),
            [
                (
                    each.key,
                    each.waiting,
                    each.in_flight,
                    "a dead letter" if each.is_held else "its limit" if each.is_limited else None,
                )
                for each in report.keys
            ],
        )
    if report.consumers:
        session.out.line()
        _show_consumers(session, report.consumers)


async def list_consumers(session: Session) -> None:
    """List the consumers that received messages lately or wait for some, with rates and errors."""
    name, consumers = await read_reports(session, lambda mailbox: mailbox.list_consumers())
    if session.out.as_json:
        session.out.json({"mailbox": name, "consumers": consumers})
        return
    _show_consumers(session, consumers)


def _show_consumers(session: Session, consumers: "Iterable[ConsumerReport]") -> None:
    session.out.table(
        ("consumer", "topic", "waits", "in flight", "received", "acked", "failed", "p95", "last", "error"),
        [
            (
                each.consumer or "(no name)",
                each.topic or "(sent earlier)",
                each.receivers,
                each.in_flight,
                each.received,
                each.acked,
                each.failed,
                None if each.work_p95_ms is None else format_duration(each.work_p95_ms),
                None if each.last_received is None else Time(each.last_received),
                each.last_error,
            )
            for each in consumers
        ],
    )


async def pause(session: Session, topic: Topic) -> None:
    """Stop the delivery of a topic's messages until it is resumed; sends and acks continue."""
    async with use_mailbox(session) as postroom:
        await postroom.pause_topic(topic)
    session.out.result({"topic": topic, "paused": True}, f"{topic} is paused")


async def resume(session: Session, topic: Topic) -> None:
    """Deliver the messages of a paused topic again."""
    async with use_mailbox(session) as postroom:
        await postroom.resume_topic(topic)
    session.out.result({"topic": topic, "paused": False}, f"{topic} is resumed")


async def purge(session: Session, topic: Topic, yes: Yes = False) -> int | None:
    """Remove the waiting messages and the dead letters of a topic; those in flight stay.

    Their history stays in the log. postroom dlq purge removes only the dead letters.
    """
    refusal = WrongUsage(f"Purging {topic} can't be undone; add --yes to confirm.")
    if not yes and not session.out.confirm(f"Remove all messages of {topic} but those in flight?", refusal):
        return REFUSED
    async with use_mailbox(session) as postroom:
        count = await postroom.purge_topic(topic, ready=True)
    session.out.result({"purged": count}, f"{pluralize(count, 'message')} purged from {topic}")
    return None


async def policy(
    session: Session,
    topic: Topic,
    changes: Annotated[
        list[str] | None,
        Argument(metavar="[NAME=VALUE]...", help="Fields to change, such as visibility=30s max_attempts=3."),
    ] = None,
    yes: Yes = False,
) -> int | None:
    """Show the policy of a topic and the section that sets each field, or change some of the fields.

    The other fields go on following the globs of [topics] and [policy].
    """
    if changes and topic in session.settings.topics:
        raise InvalidRequest(
            f'The policy of {topic} is set in {session.settings.file}; change [topics."{topic}"] there, and '
            "run postroom apply."
        )
    pairs = parse_pairs(changes or (), "Change")
    if pairs:
        fields = parse_fields(TopicPolicy(), pairs, f"The policy of {topic}")
        async with use_mailbox(session, create=True) as postroom:
            from postroom.adapters.cli.mailbox import invalid_settings

            with invalid_settings():
                if not await _confirm(session, postroom, topic, fields, yes=yes):
                    return REFUSED
                await postroom.set_topic_policy(topic, fields)
            if session.is_remote:
                current = await postroom.get_topic_policy(topic)
                session.out.result({"topic": topic, "policy": current}, f"The policy of {topic} is changed")
                return None
    with session.read(session.mailbox) as reader:
        resolved = explain_policy(reader.get_settings(), topic)
        topics = reader.list_topics()
    if session.out.as_json:
        facts = {name: each.value for name, each in resolved.items()}
        sections = {name: each.section for name, each in resolved.items()}
        session.out.json({"topic": topic, "policy": facts, "sections": sections})
        return None
    if not pairs:
        note_unknown_topic(session, topic, topics)
    rows = [(_short(name), _shown(name, each.value), each.section) for name, each in resolved.items()]
    session.out.table(("field", "value", "section"), rows)
    waiting = next((each.shards_in_use for each in topics if each.topic == topic), None)
    if waiting is not None:
        session.out.note(f"{topic} uses {waiting} shards until its messages are settled.")
    return None


async def _confirm(
    session: Session, mailbox: "Mailbox", topic: str, fields: "dict[str, Any]", *, yes: bool
) -> bool:
    """Return whether fields of a policy may be set; ask if something would be lost.

    A server previews changes only for users who may administer all its topics; other users are not asked.
    """
    if yes:
        return True
    try:
        preview = await mailbox.preview_settings(SettingsChanges(topics={topic: fields}))
    except Forbidden:
        return True
    from postroom.adapters.cli.mailbox import confirm

    return confirm(session, preview, yes=yes)


def note_unknown_topic(session: Session, topic: str | None, topics: "Iterable[TopicSummary]") -> None:
    """Tell people that no mailbox that was read has the topic that they named, and which topics exist."""
    names = {each.topic for each in topics}
    if topic is not None and topic not in names:
        session.out.note(f"There is no topic {topic}; {describe_choices(topic, names)}")


def _changes(policy: TopicPolicy | None, default: TopicPolicy) -> Iterator[str]:
    """Yield the fields in which a policy differs from the default."""
    for name in TopicPolicy.__struct_fields__ if policy is not None else ():
        value = getattr(policy, name)
        if value != getattr(default, name):
            yield f"{_short(name)}={_shown(name, value)}"


def _short(name: str) -> str:
    return name.removesuffix("_ms")


def _shown(name: str, value: Any) -> str | int:
    """Return the value of a field in the form in which users set it."""
    if type(value) is not int:
        return show_setting(value)
    return format_duration(value) if name.endswith("_ms") else value


def simulate(
    session: Session,
    max_attempts: Annotated[int | None, Option(help="Deliveries before a message is dead-lettered.")] = None,
    backoff_base: Annotated[
        str | None, Option(metavar="DURATION", help="First backoff; it doubles with each attempt.")
    ] = None,
    backoff_max: Annotated[str | None, Option(metavar="DURATION", help="Longest backoff.")] = None,
    visibility: Annotated[str | None, Option(metavar="DURATION", help="Visibility of a delivery.")] = None,
    start: Annotated[
        str | None,
        Option("--from", metavar="POSITION|TIME", help="First message: log position, RFC 3339, or age."),
    ] = None,
    end: Annotated[
        str | None, Option("--to", metavar="POSITION|TIME", help="End (exclusive), in the same format.")
    ] = None,
    topic: Annotated[
        list[str] | None, Option(help="Topic or glob such as admin.users.*; may be repeated.")
    ] = None,
    archive: Archive = None,
) -> int | None:
    """Replay past messages under another retry policy; compare dead letters, deliveries and time in queue.

    Omitted options keep their past values. How a delivery that never took place would have ended is
    unknown, so figures that depend on one are shown as a range, from the best to the worst case.
    """
    from postroom.application.queries.simulate_policy import Simulation
    from postroom.domain.policy import Changes

    changes = Changes(
        max_attempts=max_attempts,
        backoff_base_ms=_ms(backoff_base),
        backoff_max_ms=_ms(backoff_max),
        visibility_ms=_ms(visibility),
    )
    if changes == Changes():
        raise WrongUsage(
            "Pass at least one of --max-attempts, --backoff-base, --backoff-max and --visibility."
        )
    now = datetime.now(UTC)
    since, until = (None if text is None else parse_moment(text, now) for text in (start, end))
    names = session.mailboxes()
    if len(names) != 1 and (isinstance(since, int) or isinstance(until, int)):
        raise WrongUsage("A log position refers to one mailbox; name it with --mailbox.")
    simulation = Simulation(changes)
    for name in names:
        with session.read(name, archive) as reader, session.out.progress(f"Replaying {name}") as advance:
            reader.simulate_policy(
                simulation,
                start=since,
                end=until,
                topics=topic or (),
                progress=lambda position, advance=advance: advance(position, f"position {position:,}"),  # type: ignore[misc]
            )
    comparison = simulation.comparison()
    _show(session, comparison)
    return None if comparison.messages else NOTHING


def _ms(duration: str | None) -> int | None:
    return None if duration is None else parse_duration(duration)


def _show(session: Session, comparison: "Comparison") -> None:
    if session.out.as_json:
        session.out.json(comparison)
        return
    if not comparison.messages:
        session.out.note("No message matches these topics and times.")
        return
    rows = [_row(name, comparison, field, "{:,}".format) for name, field in _COUNTS]
    rows += [_row(name, comparison, field, format_duration) for name, field in _TIMES]
    session.out.table((f"of {pluralize(comparison.messages, 'message')}", "actual", "simulated"), rows)
    for line in _findings(comparison):
        session.out.line(line)
    session.out.note(f"Assumptions:\n{comparison.assumptions}")


_COUNTS = (
    ("settled at the end", "settled"),
    ("dead at the end", "dead"),
    ("removed", "removed"),
    ("still waiting or in flight", "waiting"),
    ("dead-lettered at any time", "dead_lettered"),
    ("deliveries", "deliveries"),
)
_TIMES = (
    ("time in queue, median", "queued_p50_ms"),
    ("time in queue, p95", "queued_p95_ms"),
    ("time in queue, longest", "queued_max_ms"),
)


def _row(
    name: str, comparison: "Comparison", field: str, text: Callable[[float], str]
) -> tuple[str, str, str]:
    actual, *range_ = (
        getattr(each, field) for each in (comparison.observed, comparison.best, comparison.worst)
    )
    low, high = text(min(range_)), text(max(range_))
    return name, text(actual), low if low == high else f"{low} to {high}"


def _findings(comparison: "Comparison") -> list[str]:
    findings = [f"{pluralize(comparison.unchanged, 'message')} would be unaffected."]
    if comparison.avoided:
        findings.append(f"{pluralize(comparison.avoided, 'dead letter')} would certainly have been settled.")
    if comparison.pending:
        findings.append(
            f"{pluralize(comparison.pending, 'dead letter')} would still be waiting at the end of the log."
        )
    if comparison.caused:
        findings.append(
            f"{pluralize(comparison.caused, 'other message')} would certainly have been dead-lettered."
        )
    if comparison.undecided:
        findings.append(
            f"{pluralize(comparison.undecided, 'message')} would have had deliveries that never took place, "
            f"up to {comparison.more_deliveries:,} in total; their outcome is unknown, so figures are ranges."
        )
    return findings
