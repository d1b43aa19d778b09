"""Options that limit a capability and write its token, and the settings `[access]`."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    WrongUsage,
    exact_duration,
    exact_size,
    parse_duration,
    parse_position,
    parse_size,
    parse_time,
)
from postroom.domain.capability.access import combine
from postroom.domain.capability.rights import (
    QUOTA_WINDOWS_MS,
    BindPrincipal,
    Caveat,
    Expires,
    Mailboxes,
    MaxMessages,
    NotBefore,
    Operations,
    Quota,
    Right,
    Topics,
)
from postroom.domain.capability.token import Token, to_access_key

if TYPE_CHECKING:
    from postroom.adapters.cli.output import Time
    from postroom.application.access.guard import AccessSettings


ALL = "all"

MailboxNames = Annotated[
    list[str] | None,
    Option("--mailbox", metavar="NAME", help="Mailbox or glob such as acme@*; may be repeated."),
]
TopicNames = Annotated[
    list[str] | None,
    Option("--topic", metavar="NAME", help="Topic or glob such as orders.*; may be repeated."),
]
OperationNames = Annotated[
    list[str] | None,
    Option(
        "--operation",
        metavar="NAME",
        help=f"{', '.join(Right)}, or all; may be repeated or separated by commas.",
    ),
]
ExpiresIn = Annotated[
    str | None,
    Option("--expires-in", metavar="DURATION", help="Duration after which the token expires, such as 12h."),
]
ValidFrom = Annotated[
    str | None,
    Option(
        "--not-before",
        metavar="TIME",
        help="Not valid before this RFC 3339 time, or before this duration has passed.",
    ),
]
Quotas = Annotated[
    list[str] | None,
    Option(
        "--quota",
        metavar="AMOUNT/WINDOW",
        help="Calls or bytes of messages per 1s, 1m, 1h or 1d, such as 1000/1m or 50MB/1h; may be repeated.",
    ),
]
BindsPrincipal = Annotated[
    bool,
    Option(
        "--bind-principal",
        help="Its messages have its principal: those that name none get it, others are refused.",
    ),
]
Messages = Annotated[
    int | None, Option("--max-messages", metavar="N", help="Maximum number of messages in a call.", min=1)
]


def parse_operations(names: Iterable[str]) -> tuple[Right, ...]:
    """Return the operations with these names; raise WrongUsage for an unknown one."""
    operations: list[Right] = []
    for name in (part.strip() for text in names for part in text.split(",")):
        if name == ALL:
            operations += Right
        elif name in list(Right):
            operations.append(Right(name))
        else:
            raise WrongUsage(f"Unknown operation {name!r}; expected {', '.join(Right)}, or all.")
    return tuple(sorted({*operations}, key=list(Right).index))


def parse_caveats(
    *,
    now_ms: int,
    mailboxes: Iterable[str] | None = None,
    topics: Iterable[str] | None = None,
    operations: Iterable[str] | None = None,
    expires_in: str | None = None,
    not_before: str | None = None,
    quotas: Iterable[str] | None = None,
    max_messages: int | None = None,
    bind_principal: bool = False,
) -> list[Caveat]:
    """Return the caveats that options describe; an omitted option adds none.

    Raises: WrongUsage for a value that can't be parsed.
    """
    caveats: list[Caveat] = []
    if mailboxes:
        caveats.append(Mailboxes(tuple(mailboxes)))
    if topics:
        caveats.append(Topics(tuple(topics)))
    if operations:
        caveats.append(Operations(parse_operations(operations)))
    if not_before is not None:
        caveats.append(NotBefore(_parse_future(not_before, now_ms)))
    if expires_in is not None:
        caveats.append(Expires(now_ms + parse_duration(expires_in)))
    caveats += [parse_quota(each) for each in quotas or ()]
    if max_messages is not None:
        caveats.append(MaxMessages(max_messages))
    if bind_principal:
        caveats.append(BindPrincipal())
    return caveats


def parse_quota(text: str, name: str = "--quota") -> Quota:
    """Return a quota such as `1000/1m` (calls) or `50MB/1h` (bytes of messages); raise WrongUsage otherwise.

    Arguments:
        name: option or setting, for the error.
    """
    amount, slash, window = text.partition("/")
    if slash:
        window_ms = parse_duration(window)
        if window_ms not in QUOTA_WINDOWS_MS:
            windows = ", ".join(map(exact_duration, QUOTA_WINDOWS_MS))
            raise WrongUsage(f"The window of {name} {text!r} must be one of {windows}.")
        operations = parse_position(amount)
        if operations is not None:
            return Quota(operations, None, window_ms)
        return Quota(None, parse_size(amount), window_ms)
    raise WrongUsage(f"{name} {text!r} is not AMOUNT/WINDOW, such as 1000/1m or 50MB/1h.")


def describe_quota(quota: Quota) -> str:
    """Return a quota as `parse_quota` accepts it; both limits, where it has both."""
    window = exact_duration(quota.window_ms)
    calls = [] if quota.operations is None else [f"{quota.operations}/{window}"]
    return " and ".join(calls + ([] if quota.bytes is None else [f"{exact_size(quota.bytes)}/{window}"]))


def _parse_future(text: str, now_ms: int) -> int:
    try:
        return now_ms + parse_duration(text)
    except WrongUsage:
        return parse_time(text, datetime.fromtimestamp(now_ms / 1_000, UTC))


CACHE_TTL_MS = 30_000


class AccessSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[access]`.

    Arguments:
        key_file: path of the keys that sign capabilities; None takes a file beside the store.
        cap_cache_ttl_ms: how long a verified token is not verified again, 5 to 120 s.
        quotas: by principal, such as `1000/1m` or `50MB/1h`; `*` applies to every principal that is not
            named.
    """

    key_file: str | None = None
    cap_cache_ttl_ms: int = CACHE_TTL_MS
    quotas: dict[str, str] = {}

    def validate(self) -> "AccessSection":
        """Return the settings; raise InvalidRequest for one out of bounds."""
        self.control()
        return self

    def control(self) -> "AccessSettings":
        """Return the settings of access control; raise InvalidRequest for one out of bounds."""
        from postroom.application.access.guard import AccessSettings

        quotas = {
            principal: parse_quota(text, f"the quota of {principal}")
            for principal, text in self.quotas.items()
        }
        return AccessSettings(cap_cache_ttl_ms=self.cap_cache_ttl_ms, principal_quotas=quotas).validate()


MODE = 0o600
Out = Annotated[
    str | None,
    Option("--out", metavar="FILE", help="Write the token to a file that only its owner can read."),
]


@contextmanager
def writing_token(session: Session, file: str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes the text of a token to a file, or to stdout for people.

    The file is created before the token is issued, so that no token is lost because its file can't be
    written. It replaces an existing file once it is complete.
    """
    if file is None:

        def show(text: str) -> None:
            for line in () if session.out.as_json else text.splitlines():
                session.out.line(line)

        yield show
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


def report_token(session: Session, text: str, out: str | None, *, access_key: bool = False) -> None:
    """Report a new token; JSON has its text, and its access key if asked for, unless they are in a file."""
    token = Token.decode(text)
    identifier = token.read_identifier()
    expires = combine(identifier, token.read_caveats()).expires
    if session.out.as_json:
        facts: dict[str, Any] = {
            "nonce": identifier.nonce.hex(),
            "principal": identifier.principal,
            "expires": str(show_time(expires)),
        }
        secrets = {"token": text}
        if access_key:
            secrets = {f"access_key_{name}": value for name, value in to_access_key(token)._asdict().items()}
        session.out.json(facts | (secrets if out is None else {"file": out}))
    else:
        where = "" if out is None else f", in {out}"
        session.out.note(f"Nonce {identifier.nonce.hex()}, expires {show_time(expires).age}{where}.")


def show_time(at_ms: int) -> "Time":
    """Return a time in ms since 1970 UTC as a cell or text."""
    from postroom.adapters.cli.output import Time

    return Time(at_ms * 1_000)


def now_ms() -> int:
    """Return the time in ms since 1970 UTC."""
    return time.time_ns() // 1_000_000
