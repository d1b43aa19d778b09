"""Options that limit a capability, and the rights and caveats that they describe."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated

from typer import Option

from postroom.adapters.cli.values import (
    WrongUsage,
    exact_duration,
    exact_size,
    parse_duration,
    parse_position,
    parse_size,
    parse_time,
)
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
    """Return the caveats that options describe; none for options that were omitted.

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
