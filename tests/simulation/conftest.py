import logging

import pytest

from postroom.application.mailbox import snapshots
from postroom.domain.mailbox import snapshot


@pytest.fixture(autouse=True)
def quiet_log() -> None:
    """Leave out what the engine logs about the thousands of faults that a simulation injects on purpose."""
    logging.getLogger("postroom").setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mailboxes of a few messages save snapshots in parts of several steps, and give old ones up."""
    monkeypatch.setattr(snapshots, "PART_EVENTS", 12)
    monkeypatch.setattr(snapshot, "ROW_BYTES", 200)
    monkeypatch.setattr(snapshots, "STEP_CHUNKS", 1)
    monkeypatch.setattr(snapshots, "PART_WEIGHT", 1)
    monkeypatch.setattr(snapshots, "ALLOWED_WEIGHT", 4)
    monkeypatch.setattr(snapshots, "CHUNK_ITEMS", 2)
    monkeypatch.setattr(snapshots, "BLOCK_ITEMS", 1)
