"""Named `.sql` statements, the schema of their tables, numbered migrations, and errors about the log."""

import re
from functools import cache
from hashlib import sha256
from pkgutil import get_data
from typing import NamedTuple

from postroom.domain.errors import IntegrityFailure, InvalidRequest

_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}\Z")


def read_text(package: str, resource: str) -> str:
    """Return a file of a package; `importlib.resources` takes much longer to import.

    Raises: OSError if it is missing.
    """
    return (get_data(package, resource) or b"").decode()


def statements(package: str, resource: str, **constants: str) -> dict[str, str]:
    """Return the statements of a `.sql` file in a package, by name.

    Arguments:
        resource: the file's name; a comment `-- name: its_name` precedes each statement.
        constants: values of placeholders in braces; others remain.
    """
    text = read_text(package, resource)
    for name, value in constants.items():
        text = text.replace(f"{{{name}}}", value)
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def check_schema(name: str) -> str:
    """Return the name of a schema.

    Raises: InvalidRequest unless it is an identifier that needs no quotes, and no schema of the server.
    """
    if not _SCHEMA.match(name) or name == "information_schema":
        raise InvalidRequest(
            f"{name!r:.80} can't be the schema of a store; name it by 1 to 63 lower-case letters, digits and "
            "underscores, not beginning with a digit or pg_."
        )
    return name


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


def check_ids(error: Exception, where: str) -> None:
    """Raise IntegrityFailure if a database error is the violation of the unique index on message ids.

    The log accepts an id once in a topic, so one of the records was altered. Read models that an earlier
    release built accept it once in a mailbox.

    Arguments:
        where: the read models' name for messages.
    """
    if "message_id" in str(error):
        raise IntegrityFailure(
            f"The read models {where} can't include a message: another message of its topic has the "
            "same id, so one of the two was altered in the log, or an earlier release built the read "
            "models. Check the log with `postroom verify`; if it is intact, run `postroom views rebuild`, "
            "else restore the store from a backup."
        ) from error
