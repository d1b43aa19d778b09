"""The table of tests/README.md: each clause of the specification has tests, and they exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "README.md"
SPECIFICATION = ROOT.parent / "shared" / "seeds"
"""Folder of the specification, which is not part of the repository."""


def numbered(prefix: str, count: int, width: int = 1) -> list[str]:
    return [f"{prefix}{number:0{width}}" for number in range(1, count + 1)]


CLAUSES = {
    "svc-mailbox": [*numbered("I-", 17), *numbered("P-", 9), *numbered("C-", 12), *numbered("G-", 10)],
    "SDS-047": [
        *numbered("POL-047-", 7, 3),
        *("CMD-050", "CMD-051", "CMD-052", "QRY-050", "QRY-051"),
        *numbered("EVT-047-", 2, 3),
        *numbered("PORT-047-", 5, 3),
        "2.2 Value Objects",
        "9. Database Schema",
        "10. JetStream Configuration",
        "12. Handler Contract (FastAPI)",
    ],
    "Inbox/outbox pattern": numbered("Task ", 5),
    # The RFCs do not number their rules; their clauses are titles of sections.
    "RFC-037": [
        "Header Extraction and Indexing",
        "Table Schema",
        "Backend Interfaces",
        "Pattern Configuration",
        "Schema Validation",
        "Pattern Behavior",
        "Security Considerations",
        "Appendix A: Example Queries",
        "Success Criteria",
    ],
    "RFC-049": [
        "Routable Identity Format",
        "Lease Structure",
        "Startup: Acquire Lease",
        "Runtime: Heartbeat",
        "Shutdown: Release Lease",
        "Lease Acquisition",
        "Heartbeat Processing",
        "Lease Expiration Background Job",
        "Routing Table Distribution",
        "Proxy Routing Table",
        "Query Forwarding",
        "Partition-Based Mailbox Assignment",
        "Proxy Partition Ranges",
        "Mailbox Leases Table",
        "Mailbox Routing Table",
        "Protobuf Protocol",
        "Single Admin Process",
        "Success Criteria",
    ],
}
IDS = {
    "svc-mailbox": re.compile(r"^\* \*\*\[([IPCG]-\d+)\]", re.MULTILINE),
    "SDS-047": re.compile(r"^((?:POL|EVT|PORT)-047-\d{3}|(?:CMD|QRY)-\d{3})\b", re.MULTILINE),
    "Inbox/outbox pattern": re.compile(r"^### (Task \d+):", re.MULTILINE),
}
FILES = {
    "svc-mailbox": "svc-mailbox-*.md",
    "SDS-047": "sds-047-*.md",
    "Inbox/outbox pattern": "inbox-outbox-*.md",
    "RFC-037": "rfc-037-*.md",
    "RFC-049": "rfc-049-*.md",
}


class Row(NamedTuple):
    clause: str
    tests: list[str]
    adrs: list[str]


def rows(text: str) -> Iterator[tuple[str, Row]]:
    """Yield the part of the specification and the row of each clause."""
    part = ""
    for line in text.splitlines():
        if line.startswith("## "):
            part = line[3:]
        elif line.startswith("|") and not line.startswith(("| clause", "|---")):
            clause, _, tests, adrs = (cell.strip() for cell in line.strip("|").split("|"))
            yield part, Row(clause, re.findall(r"`([^`]+)`", tests), re.findall(r"\(\.\./([^)]+)\)", adrs))


def faults(text: str) -> list[str]:
    """Return what is wrong with a table."""
    found: dict[str, list[str]] = {part: [] for part in CLAUSES}
    problems = []
    for part, row in rows(text):
        found.setdefault(part, []).append(row.clause)
        if not row.tests:
            problems.append(f"{row.clause} has no test")
        names = [test for test in row.tests if not exists(test)]
        names += [adr for adr in row.adrs if not (ROOT / adr).is_file()]
        problems += [f"{row.clause} names {name}, which does not exist" for name in names]
    return problems + [
        f"{part} has {found[part]} instead of {CLAUSES.get(part)}"
        for part in found
        if found[part] != CLAUSES.get(part)
    ]


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in names_in(ROOT / "tests" / file)


@cache
def names_in(file: Path) -> set[str]:
    text = file.read_text("utf-8") if file.is_file() else ""
    return set(re.findall(r"^ *(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def test_each_clause_of_the_specification_has_tests_that_exist() -> None:
    assert faults(TABLE.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("| G-9 |", "| G-11 |", "svc-mailbox has"),
        ("test_failover_order.py::test_under", "test_failover_order.py::test_over", "which does not exist"),
        ("0053-amnesia-mode.md", "0053-amnesia.md", "which does not exist"),
        ("## RFC-049", "## RFC-050", "RFC-049 has [] instead of"),
    ],
)
def test_a_table_that_lacks_something_is_detected(old: str, new: str, problem: str) -> None:
    text = TABLE.read_text("utf-8")
    assert old in text
    assert any(problem in each for each in faults(text.replace(old, new)))


@pytest.mark.skipif(not SPECIFICATION.is_dir(), reason="the specification is not beside the repository")
@pytest.mark.parametrize("part", CLAUSES)
def test_the_clauses_are_those_of_the_specification(part: str) -> None:
    (file,) = SPECIFICATION.glob(FILES[part])
    text = file.read_text("utf-8")
    ids = {*IDS[part].findall(text)} if part in IDS else set()
    titles = {line.strip() for line in text.splitlines()} & {*CLAUSES[part]}
    assert sorted(ids | titles) == sorted(CLAUSES[part])
