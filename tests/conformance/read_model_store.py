"""What every read model store does: parts are written once, versions become active as a whole."""

from collections.abc import Callable

import pytest

from postroom.application.messages import NewMessage
from postroom.domain.errors import NotFound
from postroom.projections.plan import Part, log_parts
from postroom.projections.ports.read_model_store import ReadModelStore
from postroom.projections.projection import Row, load_projections
from postroom.projections.tasks import RebuildTasks
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
    served_rows,
    take_extents,
    tasks,
)

MAILBOX = "main@test"
OpenStore = Callable[[], ReadModelStore]


def fill(store: Store) -> None:
    """Give a store a past of two mailboxes, one of them an archive."""
    live(store, MAILBOX, [*STORY, *VARIED])
    live(store, "archive@test", VARIED, mode="archive")


class ReadModelStoreConformance:
    """Subclass it with fixtures `store`, which `fill` gave a past, and `open_models`."""

    def test_before_anything_was_built_there_is_nothing(self, open_models: OpenStore) -> None:
        opened = open_models()
        assert opened.active_version() is None
        assert rows(opened) == {name: [] for name in load_projections()}
        with pytest.raises(NotFound, match="postroom views rebuild"):
            opened.roll_back()

    def test_what_is_served_is_what_the_reference_fold_makes(
        self, store: Store, open_models: OpenStore
    ) -> None:
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            finish(build)
            assert build.counts() == {name: len(each) for name, each in reference(store).rows.items()}
        assert rows(open_models()) == reference(store).rows
        served = open_models().active_version()
        assert served is not None
        assert served.models == dict.fromkeys(load_projections(), build.version)
        assert served.positions == {extent.name: extent.last for extent in take_extents(store)}

    def test_nothing_is_served_before_it_is_whole(self, store: Store, open_models: OpenStore) -> None:
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            build.load(lambda done, total: None)
            build.merge()
            build.index(lambda done, total: None)
            assert open_models().active_version() is None

    def test_a_part_that_is_written_again_adds_nothing(self, store: Store, open_models: OpenStore) -> None:
        with begin(store, into=open_models()) as build:
            job = tasks(store, build)
            part = log_parts(build.plan)[1]
            folded = job.fold(part, job.read(part))
            assert build.writer().write(part.name, folded) > 0
            assert build.writer().write(part.name, folded) == 0
            assert list(job.run(part)) == []
            fold_all(store, build)
            fold_all(store, build)
            finish(build)
        assert rows(open_models()) == reference(store).rows

    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_build_that_was_left_goes_on_with_the_parts_that_are_missing(
        self, store: Store, open_models: OpenStore, loaded: bool
    ) -> None:
        with begin(store, into=open_models()) as build:
            version, plan = build.version, build.plan
            job = tasks(store, build)
            first, second, *rest = log_parts(plan)
            run(job, first)
            run(job, second)
            if loaded:
                build.load(lambda done, total: None)
        expected = reference(store).rows
        send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])  # comes too late for this version
        with begin(store, into=open_models()) as build:
            assert (build.version, build.plan) == (version, plan)
            assert build.parts_done() >= {first.name, second.name}
            assert not build.parts_done() & {part.name for part in rest}
            fold_all(store, build)
            finish(build)
        assert rows(open_models()) == expected

    def test_a_build_that_was_left_when_it_was_whole_is_only_flipped(
        self, store: Store, open_models: OpenStore
    ) -> None:
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            build.load(lambda done, total: None)
            build.merge()
            build.index(lambda done, total: None)
        with begin(store, into=open_models()) as build:
            assert build.is_loaded
            build.flip(build.counts(), {})
        assert rows(open_models()) == reference(store).rows

    @pytest.mark.parametrize("restart", [True, False])
    def test_another_request_and_a_restart_begin_anew(
        self, store: Store, open_models: OpenStore, restart: bool
    ) -> None:
        with begin(store, into=open_models()) as build:
            left = build.version
            fold_all(store, build)
        models = () if restart else ("mailbox", "activity")
        with begin(store, into=open_models(), models=models, restart=restart) as build:
            assert build.version > left
            assert not build.parts_done()
            fold_all(store, build)
            finish(build)
        expected = reference(store).rows
        assert rows(open_models()) == {
            name: each if restart or name in models else [] for name, each in expected.items()
        }

    def test_a_build_that_fails_leaves_what_is_served(self, store: Store, open_models: OpenStore) -> None:
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            finish(build)
        expected, served = rows(open_models()), open_models().active_version()
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            build.fail("out of patience")
        assert open_models().active_version() == served
        assert rows(open_models()) == expected

    def test_the_version_before_is_served_again_at_once(self, store: Store, open_models: OpenStore) -> None:
        versions, found = [], []
        for _ in range(2):
            with begin(store, into=open_models()) as build:
                fold_all(store, build)
                finish(build)
            versions.append(build.version)
            found.append(rows(open_models()))
            send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
        assert found[0] != found[1]
        assert open_models().roll_back() == versions[0]
        assert rows(open_models()) == found[0]
        assert open_models().roll_back(versions[1]) == versions[1]
        assert rows(open_models()) == found[1]
        with pytest.raises(NotFound, match="99"):
            open_models().roll_back(99)

    def test_models_that_are_not_built_anew_are_shared(self, store: Store, open_models: OpenStore) -> None:
        with begin(store, into=open_models()) as build:
            fold_all(store, build)
            finish(build)
        first, expected = build.version, rows(open_models())
        send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])  # further than what is shared has read
        with begin(store, into=open_models(), models=["mailbox"]) as build:
            fold_all(store, build)
            finish(build)
        served = open_models().active_version()
        assert served is not None
        assert served.models == {**dict.fromkeys(load_projections(), first), "mailbox": build.version}
        assert rows(open_models()) == expected

    def test_places_that_retention_removed_meanwhile_are_left_out(
        self, store: Store, open_models: OpenStore
    ) -> None:
        with begin(store, into=open_models()) as build:
            job = tasks(store, build)
            for part in log_parts(build.plan):
                run(job, part)
            extent = build.plan.extents[0]
            build.load(lambda done, total: None)
            build.remove_truncated(((extent.place(extent.first), extent.place(extent.first + 30)),))
            fold_all(store, build)
            finish(build)
        left = {row["id"] for row in reference(store).rows["mailbox"]} - {extent.place(n) for n in range(31)}
        assert {row["id"] for row in rows(open_models())["mailbox"]} == left


def run(job: RebuildTasks, part: Part) -> None:
    """Run the task of a part."""
    list(job.run(part))


def rows(opened: ReadModelStore) -> dict[str, list[Row]]:
    """Return all rows that are served."""
    return {name: served_rows(opened, name) for name in load_projections()}
