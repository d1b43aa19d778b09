"""The target that a URL names: where `postroom outbox relay` publishes."""

from typing import TYPE_CHECKING

from postroom.adapters.cli.remote import ClientSettings
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.token_text import find_token_text
from postroom.adapters.cli.values import WrongUsage

if TYPE_CHECKING:
    from postroom.adapters.compose.event_targets import EventTarget, MailboxTarget

NATS = ("nats", "tls", "ws", "wss")
EXTRAS = {"kafka": "kafka,postgres", "kafka+ssl": "kafka,postgres", "amqp": "postgres,rabbitmq"}
EXTRAS |= {"amqps": EXTRAS["amqp"], "mailbox": "postgres"} | dict.fromkeys(NATS, "nats,postgres")
"""Extras that a target needs, by the scheme of its URL."""


def scheme_of(url: str | None) -> str:
    """Return the scheme of a target's URL; None is NATS.

    Raises: WrongUsage for another scheme.
    """
    scheme = "nats" if url is None else url.partition(":")[0]
    if scheme not in EXTRAS:
        raise WrongUsage(
            "A target's URL begins with nats://, kafka://, kafka+ssl://, amqp://, amqps:// or mailbox:; "
            "write one of them after --to, or as to under [outbox]."
        )
    return scheme


def target_from_url(session: Session, url: str | None, nats: str | None = None) -> "EventTarget":
    """Return the target that a URL names, with access to it by the settings of its section.

    Arguments:
        url: None takes NATS.
        nats: the URL of NATS then; None takes that of `[nats]`.

    Raises: WrongUsage for a URL of another scheme, InvalidRequest for an invalid one.
    """
    from postroom.adapters.compose.event_targets import KafkaSettings, NatsSettings, RabbitmqSettings

    scheme, section = scheme_of(url), session.settings.section
    if scheme in NATS:
        return section("nats", NatsSettings, {"url": url or nats})
    if scheme == "mailbox":
        return _mailbox(session, url or "")
    if scheme.startswith("kafka"):
        return section("kafka", KafkaSettings, {"url": url})
    return section("rabbitmq", RabbitmqSettings, {"url": url})


def _mailbox(session: Session, url: str) -> "MailboxTarget":
    from postroom.adapters.compose.event_targets import MailboxTarget
    from postroom.adapters.compose.remote import ClientTls, is_remote
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
