"""The folds over frames make the same rows as the reference, however the log is cut into ranges."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroom.application.messages import NewMessage
from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut
from postroom.projections.fold import (
    MESSAGES,
    RECORDS,
    columns_read,
    fold_pieces,
    fold_range,
    merged,
    record_schema,
)
from postroom.projections.logs import take_cuts
from postroom.projections.models.messages import PARTIAL, READS
from postroom.projections.projection import POLARS, projections
from postroom.projections.reference import ReadModels, fold
from tests.projections.histories import STORY, VARIED, Send, Step, live, open_log, steps

histories = st.lists(st.lists(steps, max_size=80), min_size=1, max_size=3)
Logs = dict[MailboxCut, list[Record]]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(histories, st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
@example([STORY, STORY], [3, 1, 7], 2)
@example([STORY], [1], 1)
@example([VARIED, STORY], [1_000], 1)
def test_ranges_folded_apart_amount_to_the_reference(
    taken: list[list[Step]], sizes: list[int], buckets: int
) -> None:
    logs = lived(taken)
    assert folded(logs, sizes, buckets) == fold(logs)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30)
@given(histories, st.data())
def test_a_log_read_to_any_position_folds_to_what_it_was_there(
    taken: list[list[Step]], data: st.DataObject
) -> None:
    logs: Logs = {}
    for cut, records in lived(taken).items():
        last = data.draw(st.integers(1, cut.last))
        logs[MailboxCut(cut.id, cut.name, cut.first, last, records[last - 1].at)] = records[:last]
    assert folded(logs, [10], 1) == fold(logs)


def test_what_cannot_be_folded_is_left_out_and_told() -> None:
    ((cut, records),) = lived([STORY]).items()
    died = next(each for each in records if each.type == "MessageDeadLettered.1")
    received = next(each for each in records if each.type == "MessageReceived.1")
    records[died.position - 1] = died._replace(state=b"\xc1 no state")
    records[received.position - 1] = received._replace(type="MessageFolded.9")
    models = folded({cut: records}, [5], 1)
    assert models == fold({cut: records})
    assert [each.place for each in models.parked] == sorted(
        map(cut.place, (received.position, died.position))
    )
    (letter,) = (row for row in models.rows["dead_letters"] if row["message_id"] == "order-1")
    assert letter["reason"] == "max_attempts"


def test_an_id_that_two_mailboxes_know_names_two_messages() -> None:
    sent = Send(NewMessage(topic="shop", payload=b"x", message_id="0193a5b0-0000-7000-8000-000000000001"))
    dead = [sent, *STORY[1:5]]
    logs = lived([[sent], [sent], dead])
    assert folded(logs, [1_000], 1) == fold(logs)
    assert folded(logs, [2], 1) == fold(logs)


def lived(taken: Sequence[Sequence[Step]]) -> Logs:
    """Return the logs of mailboxes in which these steps were taken, the second of them an archive."""
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        for number, history in enumerate(taken):
            live(store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
        logs: Logs = {}
        for cut in take_cuts(str(store)):
            with closing(open_log(store, cut.name, create_missing=False)) as log:
                logs[cut] = list(log.read())
        return logs


def folded(logs: Logs, sizes: Sequence[int], buckets: int) -> ReadModels:
    """Return what the fold over ranges makes of logs: first the ranges, then the pieces, bucket by bucket."""
    wanted, cuts = projections(), list(logs)
    parts = [fold_range(frame(part), wanted, cuts) for part in ranges(logs, sizes)]
    empty = {MESSAGES: pl.DataFrame(schema=PARTIAL), RECORDS: pl.DataFrame(schema=record_schema(wanted))}
    pieces = {name: pl.concat([none, *(part.pieces[name] for part in parts)]) for name, none in empty.items()}
    chosen = pl.col("stream").bin.encode("hex").hash() % buckets
    parts += [
        fold_pieces({name: rows.filter(chosen == bucket) for name, rows in pieces.items()}, wanted, cuts)
        for bucket in range(buckets)
    ]
    rows = merged(parts, wanted)
    return ReadModels(
        {name: rows[name].sort(*each.key).to_dicts() for name, each in wanted.items()},
        sorted(parked for part in parts for parked in part.parked),
    )


def ranges(logs: Logs, sizes: Sequence[int]) -> Iterator[list[tuple[MailboxCut, Record]]]:
    """Yield the records of all logs, as many at a time as the sizes say in turn."""
    records = [(cut, record) for cut, records in logs.items() for record in records]
    turn = 0
    while records:
        size = sizes[turn % len(sizes)]
        yield records[:size]
        records, turn = records[size:], turn + 1


def frame(part: Sequence[tuple[MailboxCut, Record]]) -> pl.DataFrame:
    """Return records as the log's readers would."""
    rows = [_row(cut, record) for cut, record in part]
    wanted = columns_read(projections())
    texts = {name for name in READS if name not in _TYPES}
    return pl.DataFrame(
        [{name: row[name] for name in wanted} for row in rows],
        schema={name: POLARS["text"] if name in texts else POLARS[_TYPES[name]] for name in wanted},
    )


def _row(cut: MailboxCut, record: Record) -> dict[str, Any]:
    return {
        **record._asdict(),
        "place": cut.place(record.position),
        "mailbox": cut.name,
        "event": record.type.partition(".")[0],
        "death_state": record.state if record.type.startswith("MessageDeadLettered.") else None,
    }


_TYPES: dict[str, Any] = {
    **dict.fromkeys(
        ("place", "position", "version", "epoch", "at", "shard", "attempt", "due", "timestamp"), "int"
    ),
    **dict.fromkeys(("stream", "envelope", "death_state"), "bytes"),
}
