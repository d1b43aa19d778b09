"""Named statements in `.sql` files, and the schema of the tables that they name."""

import re
from pkgutil import get_data

from postroom.domain.errors import InvalidRequest

_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}\Z")


def read_text(package: str, resource: str) -> str:
    """Return a file of a package; `importlib.resources` takes much longer to import.

    Raises: OSError if it is missing.
    """
    return (get_data(package, resource) or b"").decode()


def statements(package: str, resource: str) -> dict[str, str]:
    """Return the statements of a `.sql` file in a package, by name.

    Arguments:
        resource: the file's name; a comment `-- name: its_name` precedes each statement.
    """
    text = read_text(package, resource)
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
