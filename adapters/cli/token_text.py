"""Reading and writing tokens, which are never arguments: other users see those of a process."""

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.capability.access import combine
from postroom.domain.capability.token import MAX_TOKEN_CHARS, Token

if TYPE_CHECKING:
    from postroom.adapters.cli.tables import Time

VARIABLE = "POSTROOM_TOKEN"
MODE = 0o600
OTHERS = 0o077

TokenFile = Annotated[
    str | None,
    Option("--token-file", metavar="FILE", help="File with the token; - for stdin. [POSTROOM_TOKEN]"),
]
Out = Annotated[
    str | None,
    Option("--out", metavar="FILE", help="Write the token to a file that only its owner can read."),
]


def find_token_text(session: Session, file: str | None) -> str | None:
    """Return the text of a token from a file (`-` is stdin) or `POSTROOM_TOKEN`, or None without a token.

    Raises: WrongUsage for an empty file.
    """
    if file is not None or os.environ.get(VARIABLE):
        return read_token_text(session, file)
    return None


def read_token_text(session: Session, file: str | None) -> str:
    """Return the text of a token from a file, `POSTROOM_TOKEN`, or stdin, in this order.

    Raises: WrongUsage without a token.
    """
    if file is None and os.environ.get(VARIABLE):
        return os.environ[VARIABLE].strip()
    if file == "-" or (file is None and not sys.stdin.isatty()):
        text = sys.stdin.read(MAX_TOKEN_CHARS + 2)
    elif file is None:
        raise WrongUsage(f"Name the token's file with --token-file, set {VARIABLE}, or pipe it to stdin.")
    else:
        with Path(file).open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MAX_TOKEN_CHARS + 2)
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & OTHERS:
                session.out.note(f"Other users may read the token in {file}; run chmod 600 on it.")
    if not text.strip():
        raise WrongUsage("The token is empty; write what postroom token mint printed.")
    return text.strip()


@contextmanager
def writing_token(session: Session, file: str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes the text of a token to a file, or to stdout for people.

    A file is created before a token is made, so that none is lost because it can't be written; it replaces an
    existing one when it is complete.
    """
    if file is None:
        yield lambda text: None if session.out.as_json else session.out.line(text)
        return
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{token_hex(8)}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "w", encoding="ascii") as opened:

            def write(text: str) -> None:
                opened.write(f"{text}\n")
                opened.flush()
                os.fsync(descriptor)
                temporary.replace(path)

            yield write
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def report_token(session: Session, text: str, out: str | None) -> None:
    """Report a new token: as JSON with its text, unless that is in a file."""
    token = Token.decode(text)
    identifier = token.read_identifier()
    expires = combine(identifier, token.read_caveats()).expires
    if session.out.as_json:
        facts: dict[str, Any] = {
            "nonce": identifier.nonce.hex(),
            "principal": identifier.principal,
            "expires": str(show_time(expires)),
        }
        session.out.json(facts | ({"token": text} if out is None else {"file": out}))
    else:
        where = "" if out is None else f", in {out}"
        session.out.note(f"Nonce {identifier.nonce.hex()}, expires {show_time(expires).age}{where}.")


def show_time(at_ms: int) -> "Time":
    """Return a time in ms since 1970 UTC as a cell or text."""
    from postroom.adapters.cli.tables import Time

    return Time(at_ms * 1_000)


def now_ms() -> int:
    """Return the time in ms since 1970 UTC."""
    return time.time_ns() // 1_000_000
