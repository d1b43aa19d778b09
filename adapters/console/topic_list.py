"""The list of topics, which the overview and the page of topics show."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from postroom.adapters.console.page import Page
from postroom.adapters.console.values import parse_number
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.search import topic_matches

FIELDS: Final = ("topics", "show", "sort", "page")
SHOWN: Final = {
    "": "All topics",
    "messages": "With unsettled messages",
    "dead": "With dead letters",
    "paused": "Paused",
    "idle": "Without messages",
}


class Heading(NamedTuple):
    """The heading of a column, with the link that sorts by it."""

    text: str
    href: str
    is_sorted: bool


class TopicList(NamedTuple):
    """Selection, order and page of topics.

    Arguments:
        topics: part of their names, or a glob; empty for all.
        show: a key of `SHOWN`.
        sort: a column: "topic", "oldest" or the name of a number in `TopicSummary`.
        number: number of the page, from 1.
    """

    topics: str
    show: str
    sort: str
    number: int

    def read_page(
        self, page: Page, topics: Sequence[TopicSummary], columns: Mapping[str, str], rows: int, path: str
    ) -> tuple[list[TopicSummary], dict[str, Any]]:
        """Return the topics of the page of the list, and the variables of its template.

        Arguments:
            topics: all topics that the caller sees, sorted by name.
            columns: titles of the columns that sort the list.
            rows: maximum number of topics on a page.
            path: path of the list within the console.
        """
        selected = self._select(topics)
        pages = max(1, -(-len(selected) // rows))
        number = min(self.number, pages)
        return selected[(number - 1) * rows : number * rows], {
            "shown": self,
            "topics": len(topics),
            "selected": len(selected),
            "choices": list(SHOWN.items()),
            "headings": [
                Heading(text, self.url(page, path, sort=name, number=1), self.sort == name)
                for name, text in columns.items()
            ],
            "previous": self.url(page, path, number=number - 1) if number > 1 else None,
            "next": self.url(page, path, number=number + 1) if number < pages else None,
            "number_of_page": number,
            "pages": pages,
        }

    def url(self, page: Page, path: str, **changes: Any) -> str:
        """Return the link to this list with changes."""
        fields = self._replace(**changes)
        sort = None if fields.sort == "topic" else fields.sort
        number = fields.number if fields.number > 1 else None
        return page.url(path, topics=fields.topics, show=fields.show, sort=sort, page=number)

    def _select(self, topics: Sequence[TopicSummary]) -> list[TopicSummary]:
        text = self.topics.casefold()
        selected = [each for each in topics if self._is_shown(each) and self._matches(each.topic, text)]
        match self.sort:
            case "topic":
                return selected
            case "oldest":
                return sorted(selected, key=lambda each: (each.oldest_at is None, each.oldest_at))
            case name:
                return sorted(selected, key=attrgetter(name), reverse=True)

    def _is_shown(self, each: TopicSummary) -> bool:
        has_messages = bool(each.ready or each.delayed or each.in_flight)
        match self.show:
            case "messages":
                return has_messages
            case "dead":
                return bool(each.dead)
            case "paused":
                return each.paused
            case "idle":
                return not (has_messages or each.dead)
            case _:
                return True

    def _matches(self, name: str, text: str) -> bool:
        return topic_matches(self.topics, name) if "*" in text else text in name.casefold()


def read_list(query: Mapping[str, str], columns: Mapping[str, str]) -> TopicList:
    """Return the list that the parameters of a URL describe; raise InvalidRequest if one is invalid."""
    show, sort = query.get("show", ""), query.get("sort") or "topic"
    if show not in SHOWN:
        raise InvalidRequest(f"show is {show[:40]!r}; choose one of {', '.join(filter(None, SHOWN))}.")
    if sort not in columns:
        raise InvalidRequest(f"sort is {sort[:40]!r}; choose one of {', '.join(columns)}.")
    number = parse_number("page", query.get("page", "")) or 1
    return TopicList(query.get("topics", "").strip(), show, sort, number)


async def set_paused(page: Page, topic: str, *, is_paused: bool) -> str:
    """Pause or resume a topic; return the notice that says so."""
    await (page.mailbox.pause_topic if is_paused else page.mailbox.resume_topic)(topic)
    page.console.samples.forget()
    if is_paused:
        return f"Topic {topic} is paused: it delivers no more messages until it is resumed."
    return f"Topic {topic} delivers messages again."


def age_at(at: int | None, now: int) -> int | None:
    """Return the time from `at` to `now`, all in µs; 0 if `at` is later."""
    return None if at is None else max(0, now - at)
