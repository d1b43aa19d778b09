"""`postroom token`: mint, revoke and list capabilities, and rotate the keys that sign them."""

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from postroom.adapters.cli.access_settings import AccessSection
from postroom.adapters.cli.exit_codes import NOTHING, REFUSED
from postroom.adapters.cli.restrictions import (
    BindsPrincipal,
    MailboxNames,
    Messages,
    OperationNames,
    Quotas,
    TopicNames,
    ValidFrom,
    parse_caveats,
    parse_operations,
)
from postroom.adapters.cli.session import MEMORY, Session
from postroom.adapters.cli.token_text import Out, now_ms, report_token, show_time, writing_token
from postroom.adapters.cli.values import WrongUsage, exact_duration, parse_duration
from postroom.application.pluralize import pluralize
from postroom.domain.capability.rights import Rights
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
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
        write(text)
    report_token(session, text, out)


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
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
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
    if is_epoch and not yes and not _confirm(session, what):
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
    from postroom.adapters.cli.tables import Id

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


def _confirm(session: Session, what: str) -> bool:
    if session.out.as_json or not sys.stdin.isatty():
        raise WrongUsage(f"Revoking {what} can't be undone; add --yes to confirm.")
    return typer.confirm(f"Revoke {what}?", err=True)


def _key_file(session: Session, flag: str | None) -> str | None:
    return session.settings.section("access", AccessSection, {"key_file": flag}).key_file
