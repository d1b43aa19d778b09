"""Choice of the access path for a search, by counting the rows of each condition up to a limit.

Text indexes return unordered rows, so a search uses one only if it matches few messages, by their ids. If an
estimate says that it matches many, or if no index has the parts of a text, a search first looks for the page
among the first rows of another access path. Statistics never read all texts.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from postroom.adapters.sql.search import Candidates, IdList, Lead, SearchQuery

MAX_SELECTIVE_ROWS = 2_000
"""Limit on the rows of a selective condition, which are sorted and filtered."""
SUFFICIENT_ROWS = 100
"""A condition with at most this many rows is used without comparing others."""
MAX_CANDIDATES = 10_000
"""Limit on the messages that are read by the ids that a text index returns."""
MAX_COUNTED_ROWS = 50_000
"""Limit on the rows that are counted when the first rows of a condition hardly satisfied the others."""
MAX_FIRST_ROWS_PER_PAGE = 10
"""A page that probably takes at most this many times a condition's first rows is read without counting."""
Estimate = tuple[IdList, Candidates]
"""A condition with the ids of its messages, or about their number, as far as it is known."""


def read_page(db: Connection, query: SearchQuery) -> Sequence[Row[Any]]:
    """Return the rows of the page plus one.

    If no condition is selective, many messages may satisfy all conditions, or none: the first rows of an
    access path show which. Only if few of these rows satisfy the other conditions, more rows are counted to
    find the least frequent condition.
    """
    leads = query.leads()
    lead, late = _selective(db, query, leads)
    if lead is None and (path := _single_branch(query, leads, is_tried=bool(late))) is not None:
        limit = MAX_SELECTIVE_ROWS if path in leads or late else MAX_CANDIDATES
        rows = _first_rows(db, query, path, limit)
        is_frequent = len(rows) * MAX_FIRST_ROWS_PER_PAGE > query.filter.limit
        has_index = late and not any(_is_text(each) for _, each in late)
        if has_index and is_frequent and len(rows) <= query.filter.limit:
            rows = _first_rows(db, query, path, limit * MAX_FIRST_ROWS_PER_PAGE)
        if len(rows) > query.filter.limit:
            return rows
        # The rows that follow may be different: the ids of messages that were sent together begin alike.
        lead = _fewest_ids(db, query, late)
        if lead is None and is_frequent:
            lead = path
    return db.execute(query.page(lead or _least_frequent(db, query, leads))).all()


def _first_rows(db: Connection, query: SearchQuery, path: Lead, limit: int) -> Sequence[Row[Any]]:
    """Return the rows of the page that are among the first of a path."""
    return db.execute(query.page(query.first_rows(path, limit + query.filter.offset))).all()


def choose(db: Connection, query: SearchQuery) -> Lead:
    """Return the access path for all rows."""
    leads = query.leads()
    lead, late = _selective(db, query, leads)
    return lead or _fewest_ids(db, query, late) or _least_frequent(db, query, leads)


def fewest_rows(db: Connection, query: SearchQuery, limit: int) -> tuple[Lead, bool]:
    """Return the access path with the fewest rows, and whether these are at most `limit`."""
    leads = query.leads()
    lead = _least(db, query, leads, limit + 1) or _by_text(db, query, leads)[0]
    if lead is None:
        ordered = [lead for lead in leads if isinstance(lead, Lead)]
        lead = min(ordered, key=lambda lead: len(lead.branches), default=query.by_time)
    return lead, int(db.execute(query.count(lead, limit + 1)).scalar_one()) <= limit


def _selective(
    db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates]
) -> tuple[Lead | None, list[Estimate]]:
    """Return the access path with few rows, or None and the candidates that are still to be tried."""
    if len(leads) == 1 and isinstance(leads[0], Lead):
        return leads[0], []
    lead = _least(db, query, leads, MAX_SELECTIVE_ROWS)
    return (lead, []) if lead is not None else _by_text(db, query, leads)


def _least(db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates], limit: int) -> Lead | None:
    """Return the ordered access path with the fewest rows; None if all reach the limit.

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
    db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates]
) -> tuple[Lead | None, list[Estimate]]:
    """Return the messages that match a text as an access path, None if many, and the candidates not read.

    Candidates are not read if only a scan of all texts finds them, or if they are many by an estimate. The
    estimate is wrong if some terms exclude each other, or differ in frequency over time.
    """
    early, late = list[Estimate](), list[Estimate]()
    for each in leads:
        if isinstance(each, Lead):
            continue
        ids = IdList(0) if each.few is None else each.few(db)
        is_late = ids.rows > MAX_CANDIDATES or _must_scan(db, query, each)
        (late if is_late else early).append((ids, each))
        if ids.ids is not None and ids.rows <= SUFFICIENT_ROWS:
            break
    return _fewest_ids(db, query, early) if early else None, late


def _fewest_ids(db: Connection, query: SearchQuery, candidates: Sequence[Estimate]) -> Lead | None:
    """Return the fewest messages that satisfy a condition as an access path; None if they are many."""
    least, fewest = None, MAX_CANDIDATES
    for ids, each in sorted(candidates, key=lambda pair: pair[0].ids is None):
        if fewest <= SUFFICIENT_ROWS:
            break
        rows, list_ = ids if ids.ids is not None else query.list_ids(db, each, fewest)
        if rows < fewest and list_ is not None:
            least, fewest = query.by_id(each.field, list_, is_short=rows <= SUFFICIENT_ROWS), rows
    return least


def _must_scan(db: Connection, query: SearchQuery, lead: Candidates) -> bool:
    """Return whether only a scan of all texts finds the ids of messages."""
    return _is_text(lead) and query.dialect.must_scan(db, lead.ids())


def _is_text(lead: Candidates) -> bool:
    """Return whether the candidates are the messages that may have parts of a text."""
    return lead.field == "candidates"


def _single_branch(query: SearchQuery, leads: Sequence[Lead | Candidates], *, is_tried: bool) -> Lead | None:
    """Return an ordered access path with one branch, or all messages; None if there is no other to compare.

    Arguments:
        is_tried: whether to return it even then, as its first rows may make other candidates unnecessary.
    """
    ordered = [lead for lead in leads if isinstance(lead, Lead)]
    path = next((lead for lead in ordered if len(lead.branches) == 1), query.by_time)
    return None if ordered in ([], [path]) and not is_tried else path


def _least_frequent(db: Connection, query: SearchQuery, leads: Sequence[Lead | Candidates]) -> Lead:
    """Return the ordered access path with the fewest rows, as far as they are counted."""
    ordered = [lead for lead in leads if isinstance(lead, Lead)]
    least = _least(db, query, ordered, MAX_COUNTED_ROWS) if len(ordered) > 1 else None
    # Each branch fills a page by itself, or is read to its end.
    return least or min(ordered, key=lambda lead: len(lead.branches), default=query.by_time)
