"""`postroom token`: mint, attenuate, inspect, revoke and list capabilities, and rotate signing keys."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.remote import TokenFile, read_token_text
from postroom.adapters.cli.restrictions import (
    ALL,
    AccessSection,
    BindsPrincipal,
    ExpiresIn,
    MailboxNames,
    Messages,
    OperationNames,
    Out,
    Quotas,
    TopicNames,
    ValidFrom,
    describe_quota,
    now_ms,
    parse_caveats,
    parse_operations,
    report_token,
    show_time,
    writing_token,
)
from postroom.adapters.cli.session import MEMORY, Session
from postroom.adapters.cli.values import NOTHING, REFUSED, WrongUsage, Yes, exact_duration, parse_duration
from postroom.application.text import pluralize
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
from postroom.domain.capability.token import Token, to_access_key
from postroom.domain.capability.token import attenuate as add_caveat
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.cli.output import Time
    from postroom.application.access.capabilities import IssuedCapability


DEFAULT_LIFETIME = "1d"
DEFAULT_OVERLAP = "7d"
ANY = ("*",)
ONLY_WIDE = ("mailboxes", "topics", "caveats", "epoch", "key")
_NONCE = re.compile("[0-9a-f]{32}")

KeyFile = Annotated[
    str | None,
    Option(
        "--key-file",
        metavar="FILE",
        help="File with the keys; default the store's name with .keys appended. [access.key_file]",
    ),
]


def mint(
    session: Session,
    principal: Annotated[str, Argument(help="Name of the service or person who gets the token.")],
    operation: OperationNames = None,
    mailbox: MailboxNames = None,
    topic: TopicNames = None,
    expires_in: Annotated[
        str, Option(metavar="DURATION", help="Duration after which the token expires, at most 366d.")
    ] = DEFAULT_LIFETIME,
    not_before: ValidFrom = None,
    quota: Quotas = None,
    max_messages: Messages = None,
    bind_principal: BindsPrincipal = False,
    access_key: Annotated[
        bool, Option("--access-key", help="Print it as an access key, in the form of ~/.aws/credentials.")
    ] = False,
    out: Out = None,
    key_file: KeyFile = None,
) -> None:
    """Issue a capability; print its token, which is not stored, and on stderr the nonce that revokes it.

    Without --mailbox or --topic it covers all of them.
    """
    from postroom.adapters.compose.access import open_capabilities, open_key_ring

    if not operation:
        raise WrongUsage("Name what the token allows with --operation, such as --operation send,ack.")
    rights = Rights(tuple(mailbox or ANY), tuple(topic or ANY), parse_operations(operation))
    caveats = parse_caveats(
        now_ms=now_ms(),
        not_before=not_before,
        quotas=quota,
        max_messages=max_messages,
        bind_principal=bind_principal,
    )
    lifetime_ms = parse_duration(expires_in)
    store = session.existing_store()
    keys = open_key_ring(store, _key_file(session, key_file))
    with writing_token(session, out) as write, open_capabilities(store, keys) as capabilities:
        text = capabilities.issue(principal, rights, caveats, lifetime_ms=lifetime_ms)
        write(_credentials(text) if access_key else text)
    report_token(session, text, out, access_key=access_key)


def _credentials(text: str) -> str:
    """Return a token as an access key for clients of SQS."""
    key = to_access_key(Token.decode(text))
    return f"[default]\naws_access_key_id = {key.id}\naws_secret_access_key = {key.secret}"


def revoke(
    session: Session,
    nonce: Annotated[
        list[str] | None, Argument(metavar="NONCE...", help="Nonces of capabilities, as in the list.")
    ] = None,
    principal: Annotated[
        str | None, Option(help="Revoke all capabilities that were issued to this principal.")
    ] = None,
    epoch: Annotated[
        int | None, Option(min=0, help="Revoke all capabilities of this epoch and of those before it.")
    ] = None,
    every: Annotated[bool, Option("--all", help="Revoke all capabilities issued so far.")] = False,
    yes: Yes = False,
) -> int | None:
    """Revoke capabilities and all attenuated from them; servers refuse their tokens within cap_cache_ttl.

    Messages that were received before can still be acked and nacked.
    """
    if [bool(nonce), principal is not None, epoch is not None, every].count(True) != 1:
        raise WrongUsage("Name nonces, or give one of --principal, --epoch and --all.")
    for each in nonce or ():
        if not _NONCE.fullmatch(each):
            raise WrongUsage(
                f"{each[:40]!r} is not a nonce of 32 hexadecimal digits; see postroom token list."
            )
    is_epoch = every or epoch is not None
    what = "all capabilities issued so far" if every else f"the capabilities of epoch {epoch} and before"
    refusal = WrongUsage(f"Revoking {what} can't be undone; add --yes to confirm.")
    if is_epoch and not yes and not session.out.confirm(f"Revoke {what}?", refusal):
        return REFUSED
    from postroom.adapters.compose.access import open_capabilities

    with open_capabilities(session.existing_store()) as capabilities:
        if is_epoch:
            current = capabilities.revoke_epoch(epoch)
            session.out.result({"epoch": current}, f"Revoked; the epoch is now {current}")
            return None
        nonces = nonce or _valid_nonces(capabilities.list(), principal)
        for each in nonces:
            capabilities.revoke(bytes.fromhex(each))
    session.out.result({"revoked": nonces}, f"{pluralize(len(nonces), 'capability', 'capabilities')} revoked")
    return None if nonces else NOTHING


def rotate(
    session: Session,
    overlap: Annotated[
        str, Option(metavar="DURATION", help="Time for which tokens signed with earlier keys remain valid.")
    ] = DEFAULT_OVERLAP,
    key_file: KeyFile = None,
) -> None:
    """Sign with a new key from now on; the first time, create the key file."""
    from postroom.adapters.compose.access import open_capabilities, open_key_ring

    if session.store == MEMORY:
        raise InvalidRequest(
            "The store memory: and its keys end with this command; name a file with --store or "
            "POSTROOM_STORE."
        )
    overlap_ms = parse_duration(overlap)
    keys = open_key_ring(session.store, _key_file(session, key_file))
    with open_capabilities(session.store, keys) as capabilities:
        key_id = capabilities.rotate(overlap_ms)
    validity = f"are valid for {exact_duration(overlap_ms)}" if overlap_ms else "are no longer valid"
    session.out.result(
        {"key_id": key_id, "overlap_ms": overlap_ms},
        f"Key {key_id} signs from now on; tokens of earlier keys {validity}",
    )


def list_capabilities(
    session: Session,
    principal: Annotated[str | None, Option(help="Only of this principal.")] = None,
    every: Annotated[bool, Option("--all", help="Also those that have expired or were revoked.")] = False,
) -> None:
    """List the valid capabilities, oldest first; their tokens are not stored."""
    from postroom.adapters.compose.access import open_capabilities

    now = now_ms()
    with open_capabilities(session.existing_store()) as opened:
        rows = [
            (each, status)
            for each in opened.list()
            if principal in (None, each.principal) and ((status := _status(each, now)) == "valid" or every)
        ]
    if session.out.as_json:
        session.out.json({"capabilities": [_as_json(each, status) for each, status in rows]})
        return
    from postroom.adapters.cli.output import Id

    session.out.table(
        ("nonce", "principal", "operations", "status", "expires", *ONLY_WIDE),
        [
            (
                Id(each.nonce),
                each.principal,
                ", ".join(each.operations),
                Id(status),
                show_time(each.expires),
                ", ".join(each.mailboxes),
                ", ".join(each.topics),
                ", ".join(each.caveats),
                each.epoch,
                each.key_id,
            )
            for each, status in rows
        ],
        only_wide=ONLY_WIDE,
    )


def _valid_nonces(capabilities: "Iterable[IssuedCapability]", principal: str | None) -> list[str]:
    now = now_ms()
    return [
        each.nonce for each in capabilities if each.principal == principal and _status(each, now) == "valid"
    ]


def _status(capability: "IssuedCapability", now: int) -> str:
    if capability.revoked_at is not None:
        return "revoked"
    return "expired" if now >= capability.expires else "valid"


def _as_json(capability: "IssuedCapability", status: str) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(capability)
    for name in ("issued_at", "expires", "revoked_at"):
        facts[name] = None if facts[name] is None else str(show_time(facts[name]))
    return facts | {"status": status}


def _key_file(session: Session, flag: str | None) -> str | None:
    return session.settings.section("access", AccessSection, {"key_file": flag}).key_file


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
    """Show the principal and the rights of a token; needs neither key nor store.

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
    from postroom.adapters.cli.output import Prose

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
