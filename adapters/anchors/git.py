"""Commits of an anchor file to the git repository that contains it."""

import subprocess
from pathlib import Path

from postroom.domain.errors import InvalidRequest, Unavailable

TIMEOUT_SECONDS = 60


def check_repository(file: Path) -> None:
    """Raise InvalidRequest unless a file's folder is in the work tree of a git repository."""
    if _git(file, "rev-parse", "--is-inside-work-tree").stdout.strip() != "true":
        raise InvalidRequest(f"{file.parent} is not in a git repository; run git init there, or omit --git.")


def commit(file: Path, message: str) -> None:
    """Commit a file, without other staged changes; do nothing if it is unchanged.

    Raises: Unavailable with the output of git if it fails.
    """
    for arguments in (("add", "--", file.name), ("commit", "--quiet", "-m", message, "--", file.name)):
        if (
            arguments[0] == "commit"
            and not _git(file, "diff", "--cached", "--quiet", "--", file.name).returncode
        ):
            return
        done = _git(file, *arguments)
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().partition("\n")[0]
            raise Unavailable(f"The anchors are in {file}, but git {arguments[0]} failed: {reason}")


def _git(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(file.absolute().parent), *arguments],
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise InvalidRequest("--git needs the program git, which is not installed; install it.") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"git {arguments[0]} took longer than {TIMEOUT_SECONDS} s; try again.") from None
