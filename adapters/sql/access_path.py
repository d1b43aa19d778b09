"""Choice of the access path for a search, by counting the rows of each condition up to a limit.

Text indexes return unordered rows, so they are used only if they match few messages, by the ids of these.
Where no index has the parts of a text, a page is sought among the first rows before all texts are read, and
statistics never read them all.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from postroom.adapters.sql.search import Candidates, Lead, SearchQuery

MAX_SELECTIVE_ROWS = 2_000
"""Limit on the rows of a selective condition, which are sorted and filtered."""
SUFFICIENT_ROWS = 100
"""A condition with at most this many rows is used without comparing others."""
MAX_CANDIDATES = 10_000
"""Limit on the messages that are read by the ids that a text index returns."""
MAX_COUNTED_ROWS = 50_000
"""Limit on the rows that are counted when the first rows of a condition hardly satisfied the others."""
MAX_FIRST_ROWS_PER_PAGE = 10
"""A page that probably takes at most so many times the first rows of a condition is read without counting."""


def read_page(db: Connection, query: SearchQuery) -> Sequence[Row[Any]]:
    """Return the rows of the page plus one.

    If no condition is selective, many messages may satisfy all conditions, or none: the first rows of an
    access path show it. Only if they hardly satisfy the others, more rows are counted to find the least
    frequent condition.
    """
    leads = query.leads()
    lead = _selective(db, query, leads)
    must_scan = lead is None and any(
        isinstance(each, Candidates) and _must_scan(db, query, each) for each in leads
    )
    if lead is None and (path := _single_branch(query, leads, must_scan=must_scan)) is not None:
        limit = MAX_SELECTIVE_ROWS if path in leads else MAX_CANDIDATES
        rows = db.execute(query.page(query.first_rows(path, limit + query.offset))).all()
        if len(rows) > query.limit:
            return rows
        if len(rows) * MAX_FIRST_ROWS_PER_PAGE > query.limit:
            lead = path
    if lead is None and must_scan:
        lead = _by_text(db, query, leads, must_scan=True)
    return db.execute(query.page(lead or _least_frequent(db, query, leads))).all()


def choose(db: Connection, query: SearchQuery) -> Lead:
    """Return the access path for all rows."""
    leads = query.leads()
    return (
        _selective(db, query, leads)
        or _by_text(db, query, leads, must_scan=True)
        or _least_frequent(db, query, leads)
    )


def fewest_rows(db: Connection, query: SearchQuery, limit: int) -> tuple[Lead, bool]:
    """Return the access path with the fewest rows, and whether these are at most `limit`."""
    leads = query.leads()
    lead = _least(db, query, leads, limit + 1) or _by_text(db, query, leads)
    if lead is None:
        ordered = [lead for lead in leads if isinstance(lead, Lead)]
        lead = min(ordered, key=lambda lead: len(lead.branches), default=query.by_time)
    return lead, int(db.execute(query.count(lead, limit + 1)).scalar_one()) <= limit


def _selective(db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates]) -> Lead | None:
    """Return the access path with few rows, or None."""
    if len(leads) == 1 and isinstance(leads[0], Lead):
        return leads[0]
    return _least(db, query, leads, MAX_SELECTIVE_ROWS) or _by_text(db, query, leads)


def _least(db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates], limit: int) -> Lead | None:
    """Return the ordered access path with the fewest rows; None if all have as many as the limit.

    Counting stops at the fewest so far.
    """
    least, fewest = None, limit
    for lead in leads:
        if isinstance(lead, Candidates):
            continue
        rows = lead.rows
        if rows is None:
            rows = int(db.execute(query.count(lead, fewest)).scalar_one())
        if rows < fewest:
            least, fewest = lead, rows
        if fewest <= SUFFICIENT_ROWS:
            break
    return least


def _by_text(
    db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates], *, must_scan: bool = False
) -> Lead | None:
    """Return the messages that match a text as an access path; None if they are many.

    Arguments:
        must_scan: take the conditions that no text index has, instead of the others.
    """
    least, fewest = None, MAX_CANDIDATES
    for lead in leads:
        if isinstance(lead, Lead) or _must_scan(db, query, lead) != must_scan:
            continue
        query.dialect.allow_unordered(db)
        # All ids are collected before the first is returned.
        if lead.is_estimable and (query.dialect.expected_rows(db, lead.ids) or 0) > MAX_CANDIDATES:
            continue
        ids = db.scalars(lead.ids.limit(fewest)).all()
        if len(ids) < fewest:
            least, fewest = query.by_id(lead.field, ids), len(ids)
        if fewest <= SUFFICIENT_ROWS:
            break
    return least


def _must_scan(db: Connection, query: SearchQuery, lead: Candidates) -> bool:
    """Return whether the ids of messages are found only by a look at all texts."""
    return lead.field == "candidates" and query.dialect.must_scan(db, lead.ids)


def _single_branch(query: SearchQuery, leads: Sequence[Lead | Candidates], *, must_scan: bool) -> Lead | None:
    """Return an access path that is one branch, all messages if need be; None if it is the only one.

    Arguments:
        must_scan: return it even then, as its first rows may spare a look at all texts.
    """
    ordered = [lead for lead in leads if isinstance(lead, Lead)]
    path = next((lead for lead in ordered if len(lead.branches) == 1), query.by_time)
    return None if ordered in ([], [path]) and not must_scan else path


def _least_frequent(db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates]) -> Lead:
    """Return the ordered access path with the fewest rows, as far as they are counted."""
    ordered = [lead for lead in leads if isinstance(lead, Lead)]
    least = _least(db, query, ordered, MAX_COUNTED_ROWS) if len(ordered) > 1 else None
    # Each branch fills a page by itself, or is read to its end.
    return least or min(ordered, key=lambda lead: len(lead.branches), default=query.by_time)
