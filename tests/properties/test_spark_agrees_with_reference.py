"""What Spark builds of every history is what the reference fold makes of it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroom.projections import plan
from tests.conformance.read_model_store import rows
from tests.projections.histories import (
    STORY,
    VARIED,
    Step,
    Store,
    live,
    model_store,
    rebuild,
    reference,
    steps,
)

histories = st.lists(st.lists(steps, max_size=80), min_size=2, max_size=4)

pytestmark = pytest.mark.usefixtures("spark", "small_parts")


@pytest.fixture(scope="module")
def small_parts() -> Iterator[None]:
    """Parts so small that messages reach into several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "POSITIONS", (40, 40))
        patch.setattr(plan, "POSITIONS_PER_BUCKET", 60)
        yield


@settings(
    max_examples=3 if settings().max_examples <= 100 else 200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(histories)
@example([STORY, STORY])
def test_spark_agrees_with_the_reference_on_every_history(taken: list[list[Step]]) -> None:
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        for number, history in enumerate(taken):
            live(store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
        assert_agreement(store)


def test_spark_agrees_with_the_reference_on_a_log_in_postgresql(postgres_store: str) -> None:
    for number, history in enumerate([STORY, VARIED, STORY]):
        live(postgres_store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
    assert_agreement(postgres_store)


def assert_agreement(store: Store) -> None:
    rebuild(store)
    assert rows(model_store(store)) == reference(store).rows
