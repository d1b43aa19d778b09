"""Named statements in `.sql` files."""

import re
from importlib.resources import files


def statements(package: str, resource: str) -> dict[str, str]:
    """Return the statements of a `.sql` file in a package, by name.

    Arguments:
        resource: the file's name; a comment `-- name: its_name` precedes each statement.
    """
    text = files(package).joinpath(resource).read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
