"""Cursors: the positions that a version of the read models has reached, and the ends of the logs."""

from typing import NamedTuple

from postroom.domain.search import BodyRules
from postroom.projections.log_extent import LogExtent


class Version(NamedTuple):
    """A version of the read models.

    Arguments:
        models: by projection, the version whose table contains it.
        status: `active`, or `building` until it becomes active.
        bodies: topics whose bodies are searched for words.
        archive: folder of the log archive that the version includes, or None.
    """

    number: int
    status: str
    models: dict[str, int]
    bodies: BodyRules
    archive: str | None


class Cursor(NamedTuple):
    """The last record applied from a mailbox: its position, and its log time `at` in µs."""

    position: int
    at: int


class Head(NamedTuple):
    """The first and last position of a mailbox log; retention removed the records before `first`."""

    id: int
    name: str
    first: int
    last: int


class Step(NamedTuple):
    """The advance of one mailbox from the cursor `start` to the end of `extent`."""

    start: Cursor
    extent: LogExtent
