"""Where and in which form `postroom outbox relay` and `outbox capture` publish."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.remote import ClientSettings, find_token_text
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.outbox.formats import FormatName

if TYPE_CHECKING:
    from postroom.adapters.compose.brokers import EventTarget, MailboxTarget
    from postroom.application.outbox.relay import OutboxSettings

Target = Annotated[
    str | None,
    Option(
        "--to",
        metavar="URL",
        help="Target: nats://, kafka://, amqp:// or mailbox:ADDRESS#NAME. [outbox.to, or nats.url]",
    ),
]
Topic = Annotated[
    str | None,
    Option(
        "--topic",
        metavar="TEMPLATE",
        help="Subject, topic or routing key, such as {context}.{aggregate_type}. [outbox.topic]",
    ),
]
Exchange = Annotated[
    str | None,
    Option("--exchange", metavar="NAME", help="Exchange of RabbitMQ; none is the default. [outbox.exchange]"),
]
Format = Annotated[FormatName | None, Option("--format", help="Form of the messages. [outbox.format]")]
EventSource = Annotated[
    str | None,
    Option(
        "--source",
        metavar="URI",
        help="Source of CloudEvents, such as https://shop.example/orders. [outbox.source]",
    ),
]

NATS = ("nats", "tls", "ws", "wss")
EXTRAS = {"kafka": "kafka,postgres", "kafka+ssl": "kafka,postgres", "amqp": "postgres,rabbitmq"}
EXTRAS |= {"amqps": EXTRAS["amqp"], "mailbox": "postgres"} | dict.fromkeys(NATS, "nats,postgres")
"""Extras that a target needs, by the scheme of its URL."""


def publishing_settings(
    session: Session,
    *,
    to: str | None,
    topic: str | None,
    exchange: str | None,
    format_: FormatName | None,
    source: str | None,
) -> "OutboxSettings":
    """Return the settings of `[outbox]`; options of the command line take precedence.

    Raises: WrongUsage for a source of events that are not published as CloudEvents.
    """
    from postroom.application.outbox.relay import OutboxSettings

    options = {"to": to, "topic": topic, "exchange": exchange, "format": format_, "source": source}
    settings = session.settings.section("outbox", OutboxSettings, options)
    if source and settings.format == "postroom":
        raise WrongUsage(
            "--source is an attribute of CloudEvents; pass --format cloudevents-binary or "
            "cloudevents-structured, or set format under [outbox]."
        )
    return settings


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
        nats: the URL of NATS then; None takes the one of `[nats]`.

    Raises: WrongUsage for a URL of another scheme, InvalidRequest for an invalid one.
    """
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
