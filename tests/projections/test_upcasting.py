"""Events of older versions are read as those of today wherever their state is decoded."""

from pathlib import Path

import msgspec
import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import codec
from postroom.application.mailbox.fold import fold_message
from postroom.domain.message import MessageDeadLettered, Status
from postroom.domain.record import NO_HEADERS, Record
from postroom.projections.log_extent import LogExtent
from tests.conformance.records import append, life, stream
from tests.projections.histories import log_reader, read_range
from tests.projections.stored_logs import open_event_log, rows

MAILBOX = "acme@one"
PACK = msgspec.msgpack.Encoder().encode


@pytest.fixture(autouse=True)
def older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead-lettering had two versions before: without its expiry, and with its error in words."""
    upcasters: dict[str, codec.Upcaster] = {
        "MessageDeadLettered.0": lambda state: [*state, 77],
        "MessageDeadLettered.-1": lambda state: [" ".join(state)],
    }
    monkeypatch.setattr(codec, "_READ", codec.make_readers(codec.KINDS, upcasters))


def of_version(record: Record, version: int) -> Record:
    """Return the record of a dead-lettering as it was written then."""
    state = PACK(("boom",)) if version == 0 else PACK(("boom", "again"))
    return record._replace(type=f"MessageDeadLettered.{version}", state=state)


@pytest.mark.parametrize(("version", "error"), [(0, "boom"), (-1, "boom again")])
def test_an_older_event_is_read_as_one_of_today(version: int, error: str) -> None:
    *before, died = append(MemoryEventLog(MAILBOX), life(1))
    old = of_version(died, version)
    event = codec.to_event(old)
    assert event == MessageDeadLettered(stream(1), 5, died.at, 2, "max_attempts", error, 77)
    message = fold_message([*before, old])
    assert message is not None
    assert (message.status, message.last_error) == (Status.DEAD, error)


def test_what_is_read_of_a_store_to_be_folded_is_upcast_where_it_is_decoded(tmp_path: Path) -> None:
    records = append(MemoryEventLog(MAILBOX), life(1))
    records[-1] = of_version(records[-1], 0)
    log = open_event_log(str(tmp_path / "store.db"), MAILBOX)
    log.append(records)
    log.close()
    extent = LogExtent(1, MAILBOX, 1, len(records), 0)
    columns = [*Record._fields[1:11], "event", "dead_letter_state"]
    found = rows(read_range(log_reader(tmp_path / "store.db"), extent, 1, extent.last, columns))
    assert [row["event"] for row in found][-1] == "MessageDeadLettered"  # whatever its version
    assert [row["dead_letter_state"] for row in found] == [None] * 4 + [PACK(("boom",))]
    last = found[-1]
    row = (extent.last, *(last[name] for name in columns[:10]), last["dead_letter_state"], *NO_HEADERS)
    (event,) = codec.to_events([row])
    assert isinstance(event, MessageDeadLettered)
    assert (event.last_error, event.expires_at) == ("boom", 77)
