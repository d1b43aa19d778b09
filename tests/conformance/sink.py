"""What every sink does: parts are written once, only whole versions are served, kills cost little."""

from collections.abc import Callable

import pytest

from postroom.application.messages import NewMessage
from postroom.domain.errors import NotFound
from postroom.projections.logs import open_log
from postroom.projections.projection import Row, projections
from postroom.projections.sinks import Sink, parts
from postroom.projections.sinks.versions import wanted
from postroom.projections.tasks import Job
from tests.projections.histories import (
    STORY,
    VARIED,
    Store,
    begin,
    finish,
    fold_all,
    live,
    reference,
    send,
)

MAILBOX = "main@test"
OpenSink = Callable[[], Sink]


def fill(store: Store) -> None:
    """Give a store a past of two mailboxes, one of them an archive."""
    live(store, MAILBOX, [*STORY, *VARIED])
    live(store, "archive@test", VARIED, mode="archive")


class SinkConformance:
    """Subclass it with fixtures: `store`, which `fill` gave a past, and `open_sink`, which opens its sink."""

    def test_before_anything_was_built_there_is_nothing(self, open_sink: OpenSink) -> None:
        sink = open_sink()
        assert sink.served() is None
        assert rows(sink) == {name: [] for name in projections()}
        with pytest.raises(NotFound, match="postroom project rebuild"):
            sink.roll_back()

    def test_what_is_served_is_what_the_reference_fold_makes(self, store: Store, open_sink: OpenSink) -> None:
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            finish(build)
            assert build.counts() == {name: len(each) for name, each in reference(store).rows.items()}
        assert rows(open_sink()) == reference(store).rows
        served = open_sink().served()
        assert served is not None
        assert served.models == dict.fromkeys(projections(), build.version)
        assert served.positions == {cut.name: cut.last for cut in open_log(str(store)).cuts()}

    def test_nothing_is_served_before_it_is_whole(self, store: Store, open_sink: OpenSink) -> None:
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            build.load(lambda done, total: None)
            build.merge()
            build.index(lambda done, total: None)
            assert open_sink().served() is None

    def test_a_part_that_is_written_again_adds_nothing(self, store: Store, open_sink: OpenSink) -> None:
        with begin(store, sink=open_sink()) as build:
            job = Job(open_log(str(store)), build.plan, wanted(build.plan), build.writer())
            part = parts(build.plan)[1]
            folded = job.fold(part, job.read(part))
            assert build.writer().write(part.name, folded) > 0
            assert build.writer().write(part.name, folded) == 0
            assert job.fold_part(part).records == 0
            fold_all(store, build)
            fold_all(store, build)
            finish(build)
        assert rows(open_sink()) == reference(store).rows

    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_build_that_was_left_goes_on_with_the_parts_that_are_missing(
        self, store: Store, open_sink: OpenSink, loaded: bool
    ) -> None:
        with begin(store, sink=open_sink()) as build:
            version, plan = build.version, build.plan
            job = Job(open_log(str(store)), plan, wanted(plan), build.writer())
            first, second, *rest = parts(plan)
            job.fold_part(first)
            job.fold_part(second)
            if loaded:
                build.load(lambda done, total: None)
        expected = reference(store).rows
        send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])  # comes too late for this version
        with begin(store, sink=open_sink()) as build:
            assert (build.version, build.plan) == (version, plan)
            assert build.parts_done() >= {first.name, second.name}
            assert not build.parts_done() & {part.name for part in rest}
            fold_all(store, build)
            finish(build)
        assert rows(open_sink()) == expected

    def test_a_build_that_was_left_when_it_was_whole_is_only_flipped(
        self, store: Store, open_sink: OpenSink
    ) -> None:
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            build.load(lambda done, total: None)
            build.merge()
            build.index(lambda done, total: None)
        with begin(store, sink=open_sink()) as build:
            assert build.is_loaded
            build.flip(build.counts(), {})
        assert rows(open_sink()) == reference(store).rows

    @pytest.mark.parametrize("restart", [True, False])
    def test_another_request_and_a_restart_begin_anew(
        self, store: Store, open_sink: OpenSink, restart: bool
    ) -> None:
        with begin(store, sink=open_sink()) as build:
            left = build.version
            fold_all(store, build)
        models = () if restart else ("mailbox", "activity")
        with begin(store, sink=open_sink(), models=models, restart=restart) as build:
            assert build.version > left
            assert not build.parts_done()
            fold_all(store, build)
            finish(build)
        expected = reference(store).rows
        assert rows(open_sink()) == {
            name: each if restart or name in models else [] for name, each in expected.items()
        }

    def test_a_build_that_fails_leaves_what_is_served(self, store: Store, open_sink: OpenSink) -> None:
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            finish(build)
        expected, served = rows(open_sink()), open_sink().served()
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            build.fail("out of patience")
        assert open_sink().served() == served
        assert rows(open_sink()) == expected

    def test_the_version_before_is_served_again_at_once(self, store: Store, open_sink: OpenSink) -> None:
        versions, found = [], []
        for _ in range(2):
            with begin(store, sink=open_sink()) as build:
                fold_all(store, build)
                finish(build)
            versions.append(build.version)
            found.append(rows(open_sink()))
            send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
        assert found[0] != found[1]
        assert open_sink().roll_back() == versions[0]
        assert rows(open_sink()) == found[0]
        assert open_sink().roll_back(versions[1]) == versions[1]
        assert rows(open_sink()) == found[1]
        with pytest.raises(NotFound, match="99"):
            open_sink().roll_back(99)

    def test_models_that_are_not_built_anew_are_shared(self, store: Store, open_sink: OpenSink) -> None:
        with begin(store, sink=open_sink()) as build:
            fold_all(store, build)
            finish(build)
        first, expected = build.version, rows(open_sink())
        send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])  # further than what is shared has read
        with begin(store, sink=open_sink(), models=["mailbox"]) as build:
            fold_all(store, build)
            finish(build)
        served = open_sink().served()
        assert served is not None
        assert served.models == {**dict.fromkeys(projections(), first), "mailbox": build.version}
        assert rows(open_sink()) == expected

    def test_places_that_retention_removed_meanwhile_are_left_out(
        self, store: Store, open_sink: OpenSink
    ) -> None:
        with begin(store, sink=open_sink()) as build:
            job = Job(open_log(str(store)), build.plan, wanted(build.plan), build.writer())
            for part in parts(build.plan):
                job.fold_part(part)
            cut = build.plan.cuts[0]
            build.load(lambda done, total: None)
            build.remove_truncated(((cut.place(cut.first), cut.place(cut.first + 30)),))
            fold_all(store, build)
            finish(build)
        left = {row["id"] for row in reference(store).rows["mailbox"]} - {cut.place(n) for n in range(31)}
        assert {row["id"] for row in rows(open_sink())["mailbox"]} == left


def rows(sink: Sink) -> dict[str, list[Row]]:
    """Return all rows that are served."""
    return {name: [row for frame in sink.rows(name) for row in frame.to_dicts()] for name in projections()}
