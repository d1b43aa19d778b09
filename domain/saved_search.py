"""Saved searches: queries of the search page under a name, which are settings of a mailbox (ADR 0142)."""

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

import msgspec

from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import message_id, search_stream

MAX_SEARCHES = 200
"""Maximum number of saved searches of a mailbox."""
MAX_NAME_CHARS = 80
MAX_QUERY_CHARS = 2_000
_QUERY = re.compile(r"[!-\"$-~]*\Z", re.ASCII)


class SavedSearch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query of the search page under a name.

    Arguments:
        query: what the page's link has after the `?`; empty for all messages.
        principal: who saved it; None for a caller without a capability.
        saved_at: log time, µs.
    """

    name: str
    query: str
    principal: str | None
    saved_at: int

    @property
    def topics(self) -> tuple[str, ...]:
        """Return the topics and globs that the query names; none if it searches all."""
        return topics_of_query(self.query)


Searches = Mapping[str, SavedSearch]
"""Saved searches by their ids."""


def search_id(name: str, query: str) -> str:
    """Return the id of a search: one of its name and its topics.

    A search of the same name on other topics has another id, so that nobody learns of searches on topics that
    they may not read.
    """
    return message_id(search_stream(name, topics_of_query(query)))


def topics_of_query(query: str) -> tuple[str, ...]:
    """Return the topics and globs that a query names, sorted."""
    return tuple(sorted({value for name, value in parse_qsl(query) if name == "topics"}))


def check_search_name(value: object) -> str:
    """Return the name of a search, or raise InvalidRequest."""
    text = check_text("The name of a search", value, 1, MAX_NAME_CHARS)
    if not text.isprintable() or text != text.strip():
        raise InvalidRequest(
            f"The name of a search is {text!r}; use characters that can be seen, without blanks at its ends."
        )
    return text


def check_search_query(value: object) -> str:
    """Return the query of a search, or raise InvalidRequest."""
    text = check_text("The query of a search", value, 0, MAX_QUERY_CHARS)
    if not _QUERY.match(text):
        raise InvalidRequest(
            "The query of a search must be the part of the search page's link after the ?, such as "
            "topics=orders&statuses=dead, with other characters as %20."
        )
    return text
