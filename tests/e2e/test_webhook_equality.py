"""Webhook deliveries, imported across a crash: search and export answer as a scan of the file does."""

import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postroom.adapters.compose.queries import read_mailbox, read_projections
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import PostroomError
from postroom.domain.message import MessageSent, Status
from postroom.domain.search import EventFilter
from tests.e2e.conftest import Postroom, read_lines
from tests.support.exports import FORMATS, read_back

MAPPING = (
    *("--topic", "github.{event}.{action}", "--time", "payload.repository.updated_at"),
    *("--header", "principal=payload.sender.login", "--header", "repository=payload.repository.full_name"),
    *("--header", "sender=payload.sender.type"),
)
LINES = 1_600
"""At least so many are imported: the deliveries are repeated, as an import stores batches of 500 lines."""


class Delivery(NamedTuple):
    """What a line of the file says, read without any of Postroom's code."""

    line: bytes
    topic: str
    principal: str | None
    headers: dict[str, str]
    ms: int | None

    @property
    def text(self) -> str:
        return "\n".join([self.topic, self.principal or "", *self.headers, *self.headers.values()]).lower()

    @property
    def words(self) -> set[str]:
        return set(re.findall(r"[^\W_]+", self.text))


Matches = Callable[[Delivery], bool]
FILTERS: dict[str, tuple[EventFilter, Matches]] = {
    "everything": (EventFilter(), lambda d: True),
    "an exact topic": (EventFilter(topics=("github.push",)), lambda d: d.topic == "github.push"),
    "a glob at the end": (
        EventFilter(topics=("github.issue*",)),
        lambda d: fnmatchcase(d.topic, "github.issue*"),
    ),
    "a glob in the middle": (
        EventFilter(topics=("github.*.created",)),
        lambda d: fnmatchcase(d.topic, "github.*.created"),
    ),
    "several topics": (
        EventFilter(topics=("*.deleted", "github.push", "github.c*e*")),
        lambda d: any(fnmatchcase(d.topic, each) for each in ("*.deleted", "github.push", "github.c*e*")),
    ),
    "no such topic": (EventFilter(topics=("gitlab.*",)), lambda d: False),
    "publishers": (
        EventFilter(principals=("Octocoders", "octocat")),
        lambda d: d.principal in ("Octocoders", "octocat"),
    ),
    "a publisher with brackets": (
        EventFilter(principals=("octocoders-linter[bot]",)),
        lambda d: d.principal == "octocoders-linter[bot]",
    ),
    "a custom header": (
        EventFilter(headers={"repository": "Codertocat/Hello-World"}),
        lambda d: d.headers.get("repository") == "Codertocat/Hello-World",
    ),
    "custom headers": (
        EventFilter(headers={"repository": "Octocoders/Hello-World", "sender": "User"}),
        lambda d: {"repository": "Octocoders/Hello-World", "sender": "User"}.items() <= d.headers.items(),
    ),
    "a part of any header": (EventFilter(text="hello-world"), lambda d: "hello-world" in d.text),
    "parts in any case": (
        EventFilter(text="ODERTO review"),
        lambda d: "oderto" in d.text and "review" in d.text,
    ),
    "whole words": (
        EventFilter(match="octocoders hello"),
        lambda d: {"octocoders", "hello"} <= d.words,
    ),
    "a publisher's glob with a header": (
        EventFilter(
            topics=("*.created",),
            principals=("Codertocat", "github"),
            headers={"sender": "User"},
            text="hello",
        ),
        lambda d: (
            d.topic.endswith(".created")
            and d.principal in ("Codertocat", "github")
            and d.headers.get("sender") == "User"
            and "hello" in d.text
        ),
    ),
    "archived": (
        EventFilter(statuses=(Status.ARCHIVED,), topics=("*.opened",)),
        lambda d: d.topic.endswith(".opened"),
    ),
    "delivered": (EventFilter(statuses=(Status.READY, Status.ACKED)), lambda d: False),
    "namespace": (EventFilter(namespace="archive"), lambda d: True),
    "another mailbox": (EventFilter(mailbox="main@local"), lambda d: False),
}
pytestmark = pytest.mark.timeout(3_600)  # the first test imports the file three times and starts Spark
EDGES = ("2019-05-15T15:00:00", "2019-05-15T15:19:27", "2019-05-15T15:20:00", "2021-01-01T00:00:00")


def ms_of(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def within(since: int, until: int) -> Callable[[Delivery], bool]:
    return lambda d: d.ms is not None and since <= d.ms <= until


for start in EDGES:
    for end in EDGES:
        if start < end:
            since, until = ms_of(start), ms_of(end)
            FILTERS[f"from {start} to {end}"] = (
                EventFilter(start_time=since, end_time=until, topics=("github.*",)),
                within(since, until),
            )


@pytest.fixture(scope="module")
def deliveries(webhooks: Path) -> list[Delivery]:
    lines = read_lines(webhooks)
    return [_delivery(line) for line in lines * -(-LINES // len(lines))]


@pytest.fixture(scope="module")
def imported(deliveries: list[Delivery], tmp_path_factory: pytest.TempPathFactory) -> Postroom:
    """A store into which the file was imported twice, once with a crash, with read models and exports."""
    postroom = Postroom(tmp_path_factory.mktemp("webhooks"))
    lines = [delivery.line + b"\n" for delivery in deliveries]
    _import_until_killed(postroom, lines)
    survived = _stored(postroom.store)
    assert 0 < survived < len(lines)
    (postroom.folder / "webhooks.ndjson").write_bytes(b"".join(lines))
    for duplicates in (survived, len(lines)):
        facts = postroom.ok("import", "webhooks.ndjson", *MAPPING, "--json").json
        assert (facts["read"], facts["duplicates"]) == (len(lines), duplicates)
    postroom.ok("views", "rebuild")
    for format_ in FORMATS:
        exported = postroom.ok("export", format_, format_, "--payload", "--json").json
        assert exported["messages"] == len(lines)
    return postroom


@pytest.mark.parametrize("name", FILTERS)
def test_search_and_export_answer_as_a_scan_of_the_file(
    imported: Postroom, deliveries: list[Delivery], exported: list[Delivery], name: str
) -> None:
    wanted, matches = FILTERS[name]
    scanned = sorted(each.line for each in deliveries if matches(each))
    assert sorted(_search(imported, wanted)) == scanned
    assert sorted(each.line for each in exported if matches(each)) == scanned


def test_the_filters_tell_deliveries_apart(deliveries: list[Delivery]) -> None:
    found = {name: sum(map(matches, deliveries)) for name, (_, matches) in FILTERS.items()}
    assert len(set(found.values())) > 12, found


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_has_what_the_file_says(
    imported: Postroom, deliveries: list[Delivery], format_: str
) -> None:
    rows = read_back(format_, imported.folder / format_)
    # What the file doesn't date was dated when it was imported.
    undated = {each.line for each in deliveries if each.ms is None}
    read = sorted(
        _of_row(row)._replace(ms=None if row["payload"] in undated else row["timestamp"]) for row in rows
    )
    assert read == sorted(deliveries)


@pytest.mark.parametrize("format_", FORMATS)
def test_an_export_with_a_filter_has_what_a_scan_with_it_finds(
    imported: Postroom, deliveries: list[Delivery], format_: str
) -> None:
    options = (
        "--topic",
        "github.issue*",
        "--header",
        "sender=User",
        "--since",
        EDGES[0],
        "--until",
        EDGES[-1],
    )
    folder = f"{format_}-filtered"
    imported.ok("export", format_, folder, *options, "--payload", "--no-envelope")
    rows = read_back(format_, imported.folder / folder)
    assert sorted(row["payload"] for row in rows) == sorted(
        each.line
        for each in deliveries
        if each.topic.startswith("github.issue")
        and each.headers.get("sender") == "User"
        and each.ms is not None
        and ms_of(EDGES[0]) <= each.ms <= ms_of(EDGES[-1])
    )
    assert 0 < len(rows) < len(deliveries)


@pytest.fixture(scope="module")
def exported(imported: Postroom) -> list[Delivery]:
    return [_of_row(row) for row in read_back("parquet", imported.folder / "parquet")]


def _delivery(line: bytes) -> Delivery:
    document = json.loads(line)
    sender = document["payload"].get("sender") or {}
    repository = document["payload"].get("repository") or {}
    updated = repository.get("updated_at")
    headers = {"repository": repository.get("full_name"), "sender": sender.get("type")}
    return Delivery(
        line,
        ".".join(filter(None, ("github", document["event"], document.get("action")))),
        sender.get("login"),
        {name: value for name, value in headers.items() if value is not None},
        None if updated is None else round(datetime.fromisoformat(updated).timestamp() * 1_000),
    )


def _of_row(row: dict[str, Any]) -> Delivery:
    return Delivery(row["payload"], row["topic"], row["principal"], row["custom_headers"], row["timestamp"])


def _search(postroom: Postroom, wanted: EventFilter) -> Iterator[bytes]:
    with read_projections(str(postroom.store)) as projections:
        page = projections.search_messages(wanted)
        while True:
            yield from (open_envelope(each.envelope_blob).payload for each in page.items)
            if page.next_cursor is None:
                return
            fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
            page = projections.search_messages(EventFilter(**fields | {"cursor": page.next_cursor}))


def _import_until_killed(postroom: Postroom, lines: Iterable[bytes]) -> None:
    """Import from a pipe, a line at a time, and kill the import when the first of them are stored."""
    with postroom.start("import", "-", *MAPPING, piped=True) as process:
        assert process.stdin is not None
        for line in lines:
            process.stdin.write(line)
            if _stored(postroom.store):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()


def _stored(store: Path) -> int:
    """Return how many messages the log has."""
    try:
        with read_mailbox(str(store), "archive@local") as reader:
            return sum(isinstance(event, MessageSent) for _, event in reader.log.replay())
    except PostroomError:  # the store is being made
        return 0
