"""What the views of all databases share: their scripts, and what is noted about a version."""

import os
import re
import time
from importlib.resources import files
from socket import gethostname


def script(database: str, name: str) -> str:
    """Return a file of `projections/sql`."""
    return (files("postroom.projections") / "sql" / database / name).read_text("utf-8")


def statements(database: str, name: str, **values: int) -> list[str]:
    """Return the statements of a script, with `{version}` and the like replaced by their values."""
    text = re.sub(r"--.*", "", script(database, name))
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    # A body in dollar quotes has semicolons of its own.
    found = re.findall(r"(?:\$\$.*?\$\$|[^;])+", text, re.DOTALL)
    return [statement.strip() for statement in found if statement.strip()]


def owner() -> str:
    """Return who this process is, in words an operator understands."""
    return f"process {os.getpid()} on {gethostname()}"


def now() -> int:
    """Return the wall clock, in µs since 1970 UTC."""
    return time.time_ns() // 1_000
