"""An export holds what a search finds, row for row, in every format."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from postroom.adapters.compose.export import Format, export_messages
from postroom.adapters.compose.queries import open_read_models
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import ReadModels
from postroom.domain.search import EventFilter, FoundMessage, Order
from tests.conformance.read_models import filters
from tests.projections import histories
from tests.projections.histories import START_US, STORY, VARIED, live
from tests.support.examples import examples
from tests.support.exports import FORMATS, expected, read_back

ODD = [
    NewMessage(topic=topic, payload=b'a,"b"\r\n\xff', attrs={'k"\n,': "=1+1\t\u2028", " ": "x"})
    for topic in ("007", "..", "a/b:c=d%2F", "a&b c".replace(" ", ""), "'q\"\\{^", "Ünïcode/ÄRGER", "NULL")
]
OLD = [
    NewMessage(topic="shop", payload=b"old", published_at_us=us) for us in (-1, 0, -62_135_596_800_000_000)
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "store.db"
    live(path, "box0@test", [*STORY, *VARIED])
    live(path, "box1@test", VARIED)
    histories.send(path, "odd@test", [*ODD, *OLD])
    histories.build_without_spark(path)
    return path


@pytest.fixture(scope="module")
def models(store: Path) -> Iterator[ReadModels]:
    with closing(open_read_models(str(store))) as opened:
        yield opened


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.differing_executors])
@given(wanted=filters)
def test_an_export_holds_what_a_search_finds(
    models: ReadModels, store: Path, format_: Format, wanted: EventFilter
) -> None:
    found = expected(search(models, wanted))
    with TemporaryDirectory() as folder:
        source, size = export_messages(str(store), wanted, format_, Path(folder, "out"), payload=True)
        assert read_back(format_, Path(folder, "out")) == found
        assert Path(folder, "out").stat().st_size == size
    assert source.messages == len(found)


@pytest.mark.parametrize("format_", FORMATS)
def test_every_message_there_is_comes_back_from_an_export(
    models: ReadModels, store: Path, format_: Format, tmp_path: Path
) -> None:
    everything = search(models, EventFilter())
    assert {each.topic for each in ODD} < {each.topic for each in everything}
    assert min(each.timestamp for each in everything) < 0 < START_US // 1_000
    export_messages(str(store), EventFilter(), format_, tmp_path / "out", payload=True)
    assert read_back(format_, tmp_path / "out") == expected(everything)


def search(models: ReadModels, wanted: EventFilter) -> list[FoundMessage]:
    """Return what all pages of a search have, the oldest first."""
    wanted = msgspec.structs.replace(wanted, order=Order.OLDEST_FIRST, limit=50)
    page = models.search(wanted)
    found = list(page.items)
    while page.next_cursor is not None:
        page = models.search(msgspec.structs.replace(wanted, cursor=page.next_cursor))
        found += page.items
    return sorted(found, key=lambda each: (each.timestamp, each.mailbox, each.position))
