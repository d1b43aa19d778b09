"""`postroom token attenuate` and `inspect`, which need neither key nor store."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from postroom.adapters.cli.restrictions import (
    ALL,
    BindsPrincipal,
    ExpiresIn,
    MailboxNames,
    Messages,
    OperationNames,
    Quotas,
    TopicNames,
    ValidFrom,
    describe_quota,
    parse_caveats,
)
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.token_text import (
    Out,
    TokenFile,
    now_ms,
    read_token_text,
    report_token,
    show_time,
    writing_token,
)
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.capability.access import combine
from postroom.domain.capability.rights import (
    BindPrincipal,
    Caveat,
    Expires,
    Mailboxes,
    MaxMessages,
    NotBefore,
    Operations,
    Quota,
    Right,
    Rights,
    Topics,
)
from postroom.domain.capability.token import Token
from postroom.domain.capability.token import attenuate as add_caveat

if TYPE_CHECKING:
    from postroom.adapters.cli.tables import Time


def attenuate(
    session: Session,
    token_file: TokenFile = None,
    operation: OperationNames = None,
    mailbox: MailboxNames = None,
    topic: TopicNames = None,
    expires_in: ExpiresIn = None,
    not_before: ValidFrom = None,
    quota: Quotas = None,
    max_messages: Messages = None,
    bind_principal: BindsPrincipal = False,
    out: Out = None,
) -> None:
    """Print a token that allows less than another one; needs neither key nor store.

    Each option narrows the token further, so nothing that it excluded before becomes possible.
    """
    caveats = parse_caveats(
        now_ms=now_ms(),
        mailboxes=mailbox,
        topics=topic,
        operations=operation,
        expires_in=expires_in,
        not_before=not_before,
        quotas=quota,
        max_messages=max_messages,
        bind_principal=bind_principal,
    )
    if not caveats:
        raise WrongUsage("Give at least one limit, such as --topic, --operation or --expires-in.")
    token = Token.decode(read_token_text(session, token_file))
    for caveat in caveats:
        token = add_caveat(token, caveat)
    text = token.encode()
    with writing_token(session, out) as write:
        write(text)
    report_token(session, text, out)


def inspect(session: Session, token_file: TokenFile = None) -> None:
    """Show whom a token was issued to, and what it allows; needs neither key nor store.

    Only the server checks the signature, and whether the capability was revoked.
    """
    token = Token.decode(read_token_text(session, token_file))
    identifier, caveats = token.read_identifier(), token.read_caveats()
    access = combine(identifier, caveats)
    limits = [*_limits("issuer", _as_caveats(identifier.rights))]
    for number, caveat in enumerate(caveats, 1):
        limits += _limits(f"caveat {number}", [caveat])
    validity = _validity(access.not_before, access.expires)
    if session.out.as_json:
        session.out.json(
            {
                "principal": identifier.principal,
                "nonce": identifier.nonce.hex(),
                "key_id": identifier.key_id.hex(),
                "epoch": identifier.epoch,
                "issued_at": str(show_time(identifier.issued_at)),
                "not_before": str(show_time(access.not_before)) if access.not_before else None,
                "expires": str(show_time(access.expires)),
                "validity": validity,
                "operations": sorted(access.operations),
                "mailboxes": access.mailboxes,
                "topics": access.topics,
                "max_messages": access.max_messages,
                "quotas": access.quotas,
                "binds_principal": access.binds_principal,
                "limits": [{"limit": name, "value": str(value), "by": by} for name, value, by in limits],
            }
        )
        return
    from postroom.adapters.cli.tables import Prose

    session.out.facts(
        [
            ("principal", identifier.principal),
            ("nonce", identifier.nonce.hex()),
            ("key", identifier.key_id.hex()),
            ("epoch", str(identifier.epoch)),
            ("issued", show_time(identifier.issued_at)),
            ("expires", show_time(access.expires)),
            ("validity", validity),
            ("operations", _describe_operations(access.operations)),
        ]
    )
    session.out.line()
    rows = [(name, Prose(value) if isinstance(value, str) else value, by) for name, value, by in limits]
    session.out.table(("limit", "value", "by"), rows)


def _limits(by: str, caveats: "list[Caveat]") -> "Iterator[tuple[str, str | Time, str]]":
    for caveat in caveats:
        match caveat:
            case Mailboxes(patterns):
                yield "mailboxes", ", ".join(patterns), by
            case Topics(patterns):
                yield "topics", ", ".join(patterns), by
            case Operations(operations):
                yield "operations", ", ".join(operations), by
            case NotBefore(at_ms):
                yield "not before", show_time(at_ms), by
            case Expires(at_ms):
                yield "expires", show_time(at_ms), by
            case MaxMessages(messages):
                yield "messages a call", str(messages), by
            case Quota():
                yield "quota", describe_quota(caveat), by
            case BindPrincipal():
                yield "principal of messages", "its own", by


def _as_caveats(rights: Rights) -> "list[Caveat]":
    return [Mailboxes(rights.mailboxes), Topics(rights.topics), Operations(rights.operations)]


def _describe_operations(operations: Collection[Right]) -> str:
    if len(operations) == len(Right):
        return ALL
    return ", ".join(each for each in Right if each in operations) or "none"


def _validity(not_before: int, expires: int) -> str:
    now = now_ms()
    if now >= expires:
        return f"expired {show_time(expires).age} ago"
    if now < not_before:
        return f"valid {show_time(not_before).age}"
    return "valid, unless it was revoked or altered"
