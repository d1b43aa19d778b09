"""What every read-model adapter promises: `EventFilter.matches` says what a search has to find."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.read_models import BacklogFilter, ReadModels, ShardBacklog
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.message import Status
from postroom.domain.search import BodyRules, EventFilter, FoundMessage, Order
from tests.projections.histories import START_US, TOPICS
from tests.support.examples import examples

Build = Callable[[], int]
"""Build the read models of the store anew, as of now."""
SendOne = Callable[[NewMessage], None]
"""Send a message to the store."""

BODIES = BodyRules(topics=("shop", "admin.*"))
"""Whose bodies are searched for words in the store of the suite."""
TOLD = [
    NewMessage(topic=topic, payload=payload, content_type=content_type, attrs={"kind": kind})
    for topic in ("shop", "admin.users.created", "Ünïcode.ÄRGER")
    for kind, content_type, payload in (
        ("plain", None, "Straße 7, l'été 2026".encode()),
        ("typed", "text/plain; charset=utf-8", b"REFUND refused: refunds\nare over"),
        ("json", "application/json", rb'{"note": "refund\nl\u0027\u00e9t\u00e9", "to": ["bob_1", 7]}'),
        ("image", "image/png", b"refund"),
        ("binary", None, b"refund \xff\x00"),
        ("empty", None, b""),
        ("long", None, ("ab " * 1_000 + "x" * 300 + " हिन्दी 東京都").encode()),
    )
]
"""Messages with bodies of all sorts, which the store of the suite has."""

_parts = st.sampled_from(
    ["alice", "ALI", "bob", "ß", "stras", "0f3a", "7", "i̇stan", "admin", "users del", "zzz", "å", '"', "%"]
)
_matches = st.lists(
    st.sampled_from(
        [
            *(
                "alice",
                "ALI*",
                "al",
                "refund",
                "REFUND*",
                "ref*",
                "refunds",
                "l'été",
                "été",
                "7",
                "kind",
                "json",
            ),
            *(
                "strasse",
                "straße*",
                "STRASSE ß",
                "e*",
                "x*",
                "x" * 255,
                "x" * 300,
                "bob_1",
                "bob*",
                "bob",
                "東*",
            ),
            *(
                "हिन्दी",
                "ह*",
                "İstanbul",
                "0f3a",
                "admin",
                "users.del*",
                "ünïcode",
                "ÄRGER",
                "shop",
                "EU-west",
            ),
            *(
                "application/json",
                "region",
                "'refund'",
                '"over"',
                "a OR b",
                "NOT refund",
                "n*",
                "none",
                "main",
            ),
        ]
    ),
    min_size=1,
    max_size=2,
).map(" ".join)
_names = ["alice", "Bob", "STRASSE ß", "0f3a-77", "İstanbul", "nobody"]
filters = st.builds(
    EventFilter,
    start_time=st.none() | st.integers(START_US // 1_000 - 12_000, START_US // 1_000),
    end_time=st.none() | st.integers(START_US // 1_000, START_US // 1_000 + 12_000),
    topics=st.lists(
        st.sampled_from([*TOPICS, "admin.*", "*.deleted", "*", "a*s.c*d", "none.*", "shop*"]), max_size=3
    ).map(tuple),
    principals=st.lists(st.sampled_from(_names), max_size=3).map(tuple),
    statuses=st.lists(st.sampled_from(Status), max_size=3).map(tuple),
    correlation_id=st.none() | st.sampled_from(_names),
    trace_id=st.none() | st.none() | st.sampled_from(_names),
    namespace=st.sampled_from([None, None, "box0", "box1"]),
    mailbox=st.sampled_from([None, None, "box0@test", "box1@test"]),
    headers=st.dictionaries(
        st.sampled_from(["tenant", "Region", "x"]),
        st.sampled_from(["a", "EU-west", "ÅÄ", "none"]),
        max_size=2,
    ),
    text=st.none() | st.none() | _parts,
    match=st.none() | st.none() | _matches,
    order=st.sampled_from(Order),
)


class ReadModelsConformance:
    """Subclasses give fixtures: `models` over a store with a past, `build` and `send` for the same store.

    Its past has `TOLD`, and it is built with `BODIES`.
    """

    @pytest.fixture
    def everything(self, models: ReadModels) -> list[FoundMessage]:
        return _all(models, EventFilter(limit=1_000))

    @settings(
        max_examples=examples(200),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(wanted=filters, limit=st.integers(1, 40))
    def test_a_search_finds_what_the_filter_matches_page_by_page(
        self, models: ReadModels, everything: list[FoundMessage], wanted: EventFilter, limit: int
    ) -> None:
        matching = [item for item in _in_order(everything, wanted.order) if wanted.matches(item, BODIES)]
        limit = max(limit, len(matching) // 10)  # a hundred pages would show no more than ten do
        assert _all(models, _with(wanted, limit=limit)) == matching

    @settings(
        max_examples=examples(200),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(wanted=filters)
    def test_a_scan_reads_all_that_the_filter_matches_oldest_first(
        self, models: ReadModels, everything: list[FoundMessage], wanted: EventFilter
    ) -> None:
        matching = [item for item in reversed(everything) if wanted.matches(item, BODIES)]
        with models.scan(wanted) as scan:
            assert list(chain.from_iterable(scan.pages)) == matching

    def test_a_scan_goes_on_in_its_version_while_messages_arrive_and_versions_flip(
        self, models: ReadModels, build: Build, send: SendOne
    ) -> None:
        before = _all(models, EventFilter(order=Order.OLDEST_FIRST))
        status = models.status()
        with models.scan(EventFilter()) as scan:
            send(NewMessage(topic="shop", payload=b"", published_at_us=START_US + 60_000_000))
            version = build()
            assert list(chain.from_iterable(scan.pages)) == before
            assert scan.positions == {lag.mailbox: lag.position for lag in status.lags}
            assert scan.version < version
        with models.scan(EventFilter()) as scan:
            assert (scan.version, sum(map(len, scan.pages))) == (version, len(before) + 1)

    def test_a_scan_that_is_given_up_leaves_nothing_behind(self, models: ReadModels) -> None:
        with models.scan(EventFilter()) as scan:
            next(scan.pages)
        assert models.search(EventFilter(limit=1)).items

    def test_every_combination_of_filters_that_matches_a_message_finds_it(self, models: ReadModels) -> None:
        items = _all(models, EventFilter())
        assert {item.topic for item in items} >= {each.topic for each in TOLD}
        # One of the messages that have the same fields, and so the same filters.
        different = {
            (item.topic, item.status, item.mailbox, *map(bool, msgspec.structs.astuple(item))): item
            for item in items
        }
        for item in different.values():
            exact = EventFilter(
                start_time=item.timestamp,
                end_time=item.timestamp,
                topics=(item.topic,),
                principals=(item.principal,) if item.principal else (),
                statuses=(item.status,),
                message_id=item.message_id,
                correlation_id=item.correlation_id,
                trace_id=item.trace_id,
                namespace=item.namespace,
                mailbox=item.mailbox,
                headers=item.custom_headers,
                text=item.topic,
                match=item.topic,
            )
            assert _all(models, exact) == [item]
            assert models.get(item.message_id, item.mailbox) == item

    @settings(
        max_examples=examples(100),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_every_part_of_an_id_is_found(
        self, models: ReadModels, everything: list[FoundMessage], data: st.DataObject
    ) -> None:
        item = data.draw(st.sampled_from(everything))
        ids = [each for each in (item.message_id, item.correlation_id, item.trace_id, item.span_id) if each]
        id_ = data.draw(st.sampled_from(ids))
        start = data.draw(st.integers(0, len(id_) - 1))
        part = id_[start : data.draw(st.integers(start + 1, len(id_)))]
        wanted = EventFilter(text=part) if part.strip() else EventFilter()
        assert _all(models, _with(wanted, limit=100)) == [each for each in everything if wanted.matches(each)]

    @pytest.mark.parametrize(
        ("match", "found"),
        [
            ("refund", {"typed", "json"}),
            ("REFUNDS", {"typed"}),
            ("refund*", {"typed", "json"}),
            ("fund", set()),
            ("refund over", {"typed"}),
            ("refund 2026", set()),
            ("STRASSE été", {"plain"}),
            ("E\u0301TE\u0301", {"plain", "json"}),
            ("bob_1 7 note", {"json"}),
            ("xxx*", {"long"}),
            ("हिन्दी 東京*", {"long"}),
            ("東京", set()),
            ("png", {"image"}),
            ("kind shop", {"plain", "typed", "json", "image", "binary", "empty", "long"}),
        ],
    )
    def test_words_are_found_whole_in_headers_and_in_bodies_that_were_opted_in(
        self, models: ReadModels, match: str, found: set[str]
    ) -> None:
        items = models.search(EventFilter(topics=("shop",), match=match, limit=1_000)).items
        assert {item.custom_headers["kind"] for item in items} == found

    def test_text_after_a_nul_is_found(self, models: ReadModels, build: Build, send: SendOne) -> None:
        odd = NewMessage(topic="nul", payload=b"", principal="one\0Other", correlation_id="two\0second 'half")
        send(odd)
        build()
        criteria: list[dict[str, Any]] = [
            *({"text": text} for text in ("other", "e\0O", "SECOND", "o\0s", "e\0other 'ha")),
            *({"match": match} for match in ("other", "oth* one")),
            {"principals": ("one\0Other", "alice"), "text": "second"},
            {"principals": ("one\0Other", "alice"), "topics": ("nul",)},
            {"correlation_id": "two\0second 'half"},
        ]
        for criterion in criteria:
            items = models.search(EventFilter(**criterion)).items
            assert [each.topic for each in items] == ["nul"], criterion
        assert models.search(EventFilter(text="e\0second")).items == ()

    def test_as_many_words_and_parts_as_may_be_asked_for_are_looked_up(self, models: ReadModels) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = [first + second for first in letters for second in letters][:333]
        for asked in (EventFilter(match="* ".join(words[:250])), EventFilter(text=" ".join(words))):
            assert models.search(asked).items == ()

    def test_bodies_that_were_not_opted_in_are_not_searched(self, models: ReadModels) -> None:
        items = models.search(EventFilter(match="refund", limit=1_000)).items
        assert {item.topic for item in items} == {"shop", "admin.users.created"}

    def test_an_offset_skips_as_many_messages(self, models: ReadModels) -> None:
        everything = _all(models, EventFilter())
        assert list(models.search(EventFilter(offset=3, limit=4)).items) == everything[3:7]

    def test_a_found_message_gives_its_envelope_back(self, models: ReadModels) -> None:
        items = _all(models, EventFilter())
        assert items
        for item in items:
            envelope = item.reconstruct_envelope()
            assert (envelope.metadata.message_id, envelope.metadata.topic) == (item.message_id, item.topic)

    def test_pages_go_on_where_they_were_while_messages_arrive_and_versions_flip(
        self, models: ReadModels, build: Build, send: SendOne
    ) -> None:
        before = _all(models, EventFilter())
        first = models.search(EventFilter(limit=5))
        send(NewMessage(topic="shop", payload=b"", published_at_us=START_US + 60_000_000))
        send(NewMessage(topic="shop", payload=b"", published_at_us=START_US - 60_000_000))
        build()
        rest = _all(models, EventFilter(limit=5, cursor=first.next_cursor))
        seen = [*first.items, *rest]
        assert [item.message_id for item in seen[:-1]] == [item.message_id for item in before]
        assert seen[-1].timestamp == START_US // 1_000 - 60_000

    def test_a_search_shows_what_was_true_at_the_last_rebuild(
        self, models: ReadModels, build: Build, send: SendOne
    ) -> None:
        send(NewMessage(topic="shop", payload=b"", message_id="fresh"))
        with pytest.raises(NotFound, match="postroom views rebuild"):
            models.get("fresh")
        assert sum(each.lag for each in models.status().lags) > 0
        version = build()
        assert models.get("fresh").status == Status.READY
        status = models.status()
        assert status.active is not None
        assert status.active.version == version
        assert [each.lag for each in status.lags] == [0, 0]

    def test_backlog_comes_in_pages_by_shard(self, models: ReadModels) -> None:
        whole = models.backlog(BacklogFilter()).items
        assert len(whole) > 3
        paged: list[ShardBacklog] = []
        cursor = None
        while True:
            page = models.backlog(BacklogFilter(limit=2, cursor=cursor))
            paged += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        assert paged == list(whole)
        only = models.backlog(BacklogFilter(mailbox="box0@test", topics=("admin.*",))).items
        assert only == tuple(e for e in whole if e.mailbox == "box0@test" and e.topic.startswith("admin."))

    def test_dead_letters_come_in_pages_latest_death_first(self, models: ReadModels) -> None:
        whole = models.dead_letters(DeadLetterFilter()).items
        assert len(whole) > 1
        assert [each.last_seen for each in whole] == sorted((each.last_seen for each in whole), reverse=True)
        first = models.dead_letters(DeadLetterFilter(limit=1))
        rest = models.dead_letters(DeadLetterFilter(cursor=first.next_cursor))
        assert (*first.items, *rest.items) == whole
        letter = whole[0]
        alike = models.dead_letters(
            DeadLetterFilter(fingerprint=letter.fingerprint, reason=letter.reason)
        ).items
        assert alike == tuple(each for each in whole if each.fingerprint == letter.fingerprint)
        assert models.dead_letters(DeadLetterFilter(topics=("none.*",))).items == ()

    def test_stats_sum_the_archive_up(self, models: ReadModels) -> None:
        times = [item.timestamp for item in _all(models, EventFilter())]
        stats = models.stats()
        assert (stats.total_events, stats.oldest_event, stats.newest_event) == (
            len(times),
            min(times),
            max(times),
        )
        assert stats.total_size_bytes > 0

    @pytest.mark.parametrize("cursor", ["", "nonsense", "k6FhoWKhYw", "åäö"])
    def test_a_cursor_that_is_not_ours_is_refused(self, models: ReadModels, cursor: str) -> None:
        for ask in (models.backlog, models.dead_letters):
            wanted = (
                BacklogFilter(cursor=cursor) if ask == models.backlog else DeadLetterFilter(cursor=cursor)
            )
            with pytest.raises(InvalidRequest, match="next_cursor"):
                ask(wanted)  # type: ignore[arg-type]


def _all(models: ReadModels, wanted: EventFilter) -> list[FoundMessage]:
    page = models.search(wanted)
    items = list(page.items)
    while page.next_cursor is not None:
        page = models.search(_with(wanted, cursor=page.next_cursor))
        items += page.items
    return items


def _with(wanted: EventFilter, **changes: object) -> EventFilter:
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    return EventFilter(**(fields | changes))


def _in_order(items: list[FoundMessage], order: Order) -> list[FoundMessage]:
    # All of them came newest first; equal times stand in the order of their rows either way.
    return items if order == Order.NEWEST_FIRST else items[::-1]
