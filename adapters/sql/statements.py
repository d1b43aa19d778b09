"""Named statements in `.sql` files."""

import re
from pkgutil import get_data


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
