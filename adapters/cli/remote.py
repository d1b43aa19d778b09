"""Commands on a mailbox, wherever it is, targets of events, and the tokens that servers ask for.

A token is never an argument: other users can see a process's arguments.
"""

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

if TYPE_CHECKING:
    from postroom.adapters.compose.brokers import EventTarget, MailboxTarget
    from postroom.adapters.compose.outbox import MessagingSettings
    from postroom.application.operations.mailbox import Mailbox

VARIABLE = "POSTROOM_TOKEN"
OTHERS = 0o077

TokenFile = Annotated[
    str | None,
    Option("--token-file", metavar="FILE", help="File with the token; - for stdin. [POSTROOM_TOKEN]"),
]


class ClientSettings(msgspec.Struct, frozen=True):
    """Settings of `[client]`, for a store that is the URL of a server.

    Arguments:
        token_file: file with the token that is sent with each call; None takes the token from
            `POSTROOM_TOKEN`.
        ca: PEM file of the authorities that may have signed the server's certificate; None takes the
            system's.
        certificate, key: PEM files of this client's certificate, for a server that asks for one.
    """

    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@asynccontextmanager
async def use_mailbox(session: Session, *, create: bool = False) -> AsyncIterator["Mailbox"]:
    """Use the mailbox of the settings until the context manager exits; see `Session.use_any`.

    A server ignores the policies of topics in the settings file.

    Raises: the errors of `Session.use_any` and of `connect_remote`.
    """
    if not session.is_remote:
        async with session.use_any(create=create) as shared:
            yield shared
        return
    from postroom.adapters.compose.connect import ClientTls, connect_remote

    settings = session.settings
    client = settings.section("client", ClientSettings)
    files = (client.ca, client.certificate, client.key)
    async with connect_remote(
        session.store,
        settings.mailbox,
        timeout_ms=settings.timeout_ms,
        token=find_token_text(session, client.token_file),
        tls=ClientTls(*files) if any(files) else None,
    ) as mailbox:
        yield mailbox


async def read_reports(session: Session, read: Callable[[Any], Any]) -> tuple[str, Any]:
    """Return the name of the mailbox and the result of `read`, without owning a mailbox of a store.

    Arguments:
        read: calls an operation of a `Mailbox` or of a `Reader`.
    """
    if session.is_remote or session.is_namespace:
        async with use_mailbox(session) as postroom:
            return postroom.name, await read(postroom)
    with session.read(session.mailbox) as reader:
        return reader.log.mailbox, read(reader)


def read_store(session: Session, read: Callable[[Any], Any]) -> Any:
    """Return the result of `read` for the mailbox in the store; for a namespace, its owners answer.

    Arguments:
        read: calls an operation of a `Mailbox` or of a `Reader`.

    Raises: InvalidRequest for the URL of a server.
    """
    session.existing_store()
    if session.is_namespace:
        return asyncio.run(read_reports(session, read))[1]
    with session.read(session.mailbox) as reader:
        return read(reader)


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
    from postroom.domain.capability.token import MAX_TOKEN_CHARS

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


NATS = ("nats", "tls", "ws", "wss")
TARGET_EXTRAS = {"kafka": "kafka,postgres", "kafka+ssl": "kafka,postgres", "amqp": "postgres,rabbitmq"}
TARGET_EXTRAS |= {"amqps": TARGET_EXTRAS["amqp"], "mailbox": "postgres"} | dict.fromkeys(
    NATS, "nats,postgres"
)
"""Extras that a target needs, by the scheme of its URL."""


def scheme_of(url: str | None) -> str:
    """Return the scheme of a target's URL; None is NATS.

    Raises: WrongUsage for another scheme.
    """
    scheme = "nats" if url is None else url.partition(":")[0]
    if scheme not in TARGET_EXTRAS:
        raise WrongUsage(
            "A target's URL begins with nats://, kafka://, kafka+ssl://, amqp://, amqps:// or mailbox:; "
            "write one of them after --to, or as to under [outbox]."
        )
    return scheme


def event_target(
    session: Session, messaging: "MessagingSettings", url: str | None, nats: str | None = None
) -> "EventTarget":
    """Return the target that a URL names, with access to it by the settings of its section.

    Arguments:
        url: None takes NATS.
        nats: URL of NATS, if `url` is None; None takes the one of `[nats]`.

    Raises: WrongUsage without a context or for a URL of another scheme, InvalidRequest for an invalid one.
    """
    if not messaging.context:
        raise WrongUsage("No context is configured; pass --context, or set context under [messaging].")
    from postroom.adapters.compose.brokers import KafkaSettings, NatsSettings, RabbitmqSettings

    scheme, section = scheme_of(url), session.settings.section
    if scheme in NATS:
        return section("nats", NatsSettings, {"url": url or nats})
    if scheme == "mailbox":
        return _mailbox(session, url or "")
    if scheme.startswith("kafka"):
        return section("kafka", KafkaSettings, {"url": url})
    return section("rabbitmq", RabbitmqSettings, {"url": url})


def _mailbox(session: Session, url: str) -> "MailboxTarget":
    from postroom.adapters.compose.brokers import MailboxTarget
    from postroom.adapters.compose.connect import ClientTls
    from postroom.adapters.compose.store import is_remote
    from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox

    address, separator, name = url.removeprefix("mailbox:").rpartition("#")
    if not separator:
        address, name = name, DEFAULT_MAILBOX
    if not address:
        raise WrongUsage("A mailbox's URL is mailbox:ADDRESS#NAME, such as mailbox:orders.db#main@local.")
    check_mailbox(name)
    if not is_remote(address):
        return MailboxTarget(address=address, mailbox=name)
    client = session.settings.section("client", ClientSettings)
    files = (client.ca, client.certificate, client.key)
    return MailboxTarget(
        address=address,
        mailbox=name,
        token=find_token_text(session, client.token_file),
        tls=ClientTls(*files) if any(files) else None,
    )
