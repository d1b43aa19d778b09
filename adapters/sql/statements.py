"""Statements kept in `.sql` files, each under its name."""

import re
from importlib.resources import files


def statements(package: str, resource: str) -> dict[str, str]:
    """Return the statements of a `.sql` file of a package, by the names written above them.

    Arguments:
        resource: the file's name; above each statement stands `-- name: its_name`.
    """
    text = files(package).joinpath(resource).read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
