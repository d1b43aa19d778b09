"""Time travel: the unsettled messages and dead letters of a mailbox at a past moment."""

from collections.abc import Sequence
from typing import Any, Final

from postroom.adapters.console.event_filter import EPOCH, MS, parse_time
from postroom.adapters.console.page import Page
from postroom.application.query_results import Moment
from postroom.domain.errors import InvalidRequest, PostroomError
from postroom.domain.search import topic_matches

MAX_DEAD_LETTERS: Final = 100


def parse_moment(text: str) -> Moment | None:
    """Return a log position or a time, or None for empty text.

    Raises: InvalidRequest for anything else.
    """
    if not text:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    try:
        return EPOCH + parse_time("moment", text) * MS
    except OverflowError:
        raise InvalidRequest(
            f"The moment {text[:80]!r} is out of range; expected a time from year 1 to 9999."
        ) from None


async def moment_facts(page: Page, at: Moment, topics: Sequence[str]) -> dict[str, Any]:
    """Return the unsettled messages by shard and the dead letters at a moment, or the error.

    Arguments:
        topics: names or globs; all if empty.
    """
    topic = topics[0] if len(topics) == 1 and "*" not in topics[0] else None
    try:
        backlog = await page.mailbox.get_backlog(topic, at=at)
        letters = await page.mailbox.list_dead_letters(topic, limit=MAX_DEAD_LETTERS, at=at)
    except PostroomError as error:
        return {"error": error}

    def is_shown(name: str) -> bool:
        return not topics or any(topic_matches(each, name) for each in topics)

    return {
        "error": None,
        "backlog": backlog,
        "shards": [each for each in backlog.shards if is_shown(each.topic)],
        "letters": [each for each in letters if is_shown(each.topic)],
        "is_whole": len(letters) < MAX_DEAD_LETTERS,
    }
