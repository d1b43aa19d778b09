"""Numbered migrations of databases.

A set is a folder of files `NNNN_name.sql`, which are applied in order and never edited after their release.
"""

import re
from functools import cache
from hashlib import sha256
from typing import NamedTuple

from postroom.domain.errors import InvalidRequest

_FILE = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(NamedTuple):
    """One step of a set: its number and name, the hash of its text, and the text."""

    set: str
    number: int
    name: str
    checksum: str
    text: str


@cache
def read_migrations(package: str, set_: str) -> tuple[Migration, ...]:
    """Return the migrations of a set in their order.

    Arguments:
        package: the package whose folder `migrations` has the sets.

    Raises: InvalidRequest when there is no such set.
    """
    from importlib.resources import files  # slow to import, and stores are rarely migrated

    folder = files(package).joinpath("migrations")
    sets = sorted(each.name for each in folder.iterdir() if each.is_dir())
    if set_ not in sets:
        raise InvalidRequest(f"There is no set of migrations {set_!r}; the sets are {', '.join(sets)}.")
    steps = []
    for file in folder.joinpath(set_).iterdir():
        if match := _FILE.fullmatch(file.name):
            text = file.read_text("utf-8")
            checksum = sha256(text.encode()).hexdigest()
            steps.append(Migration(set_, int(match[1]), match[2], checksum, text))
    return tuple(sorted(steps))
