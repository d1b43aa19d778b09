"""`postroom demo --console`: the console of a shop with a week of history, which keeps getting orders."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from postroom.adapters.cli.console import CONSOLE_HTTP
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import Settings
from postroom.adapters.cli.up import run_parts
from postroom.adapters.compose import OwnedMailbox, OwnerSettings, open_owner_store, own_mailbox
from postroom.application.extras import MissingExtra
from postroom.application.messages import NewMessage
from postroom.application.received_messages import ReceivedMessage
from postroom.application.workers.retry import Reject
from postroom.application.workers.schedules import every
from postroom.application.workers.sending import current_mailbox
from postroom.application.workers.worker import Worker
from postroom.domain.errors import Unavailable
from postroom.domain.message import NackAction
from postroom.domain.policy import DAY_MS
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.subscription import SubscriptionFilter

MAILBOX: Final = "shop@demo"
SEED: Final = 37
US: Final = 1_000_000
MINUTE: Final = 60.0
STEPS: Final = ((6 * 24 * 60, 180, 20), (23 * 60, 10, 8), (60, 1, 3))
"""Parts of the week: length in minutes, minutes of a step, and about how many orders a step has."""
INCIDENT: Final = (5.0, 4.2)
"""Hours before now in which the warehouse does not answer."""
REDRIVE: Final = 3.5
STOP_MS: Final = 2_000
POLICY: Final = {"visibility_ms": 30_000, "max_attempts": 3, "backoff_base_ms": 200, "backoff_max_ms": 5_000}
SHOPS: Final = ("shop-berlin", "shop-lima", "shop-osaka")
STAGES: Final = (
    ("orders.created", "charge", "orders.paid"),
    ("orders.paid", "pack", "orders.shipped"),
    ("orders.shipped", "notify", "mail.requested"),
    ("mail.requested", "send_mail", ""),
    ("billing", "book", ""),
)
"""Topics with the handler of their messages, and the topic to which it sends the next one."""
ERRORS: Final = {
    "orders.created": "ConnectionError: bank.internal:443 refused the connection",
    "orders.paid": "ConnectionError: warehouse.internal:5432 refused the connection",
    "orders.shipped": "KeyError: 'address'",
    "mail.requested": "TimeoutError: the mail server did not answer within 30 s",
    "billing": "ValueError: the account 4711 is closed",
}
TRACEBACK: Final = """Traceback (most recent call last):
  File "shop/handlers.py", line 57, in {handler}
    client.call(order)
  File "shop/client.py", line 112, in call
    raise {error}
{error}
"""


class Order(msgspec.Struct):
    """An order of a customer."""

    order: int
    customer: str
    amount: float
    lines: list[dict[str, str | int]]


class PastClock:
    """A clock that the demonstration moves through the past."""

    def __init__(self, minutes: float) -> None:
        self._length = self._behind = round(minutes * MINUTE * US)

    @property
    def hours_left(self) -> float:
        """Return how far the clock is behind the present."""
        return self._behind / (3_600 * US)

    def advance(self, seconds: float) -> None:
        """Advance the clock, but never beyond the present."""
        self._behind = max(0, self._behind - round(seconds * US))

    def wall(self) -> int:
        """Return µs since 1970 UTC."""
        return time.time_ns() // 1_000 - self._behind

    def uptime(self) -> int:
        """Return µs since the machine started."""
        return time.monotonic_ns() // 1_000 + self._length - self._behind

    def boot(self) -> str:
        """Return the id of the machine's boot."""
        return "past"


def generate(chance: random.Random, start: int, count: int) -> Iterator[NewMessage]:
    """Yield orders; a few can't be charged."""
    for number in range(start, start + count):
        customer = f"customer-{chance.randrange(500)}"
        lines: list[dict[str, str | int]] = [
            {"sku": f"SKU-{chance.randrange(10**5):05}", "quantity": chance.randrange(1, 5)}
            for _ in range(chance.randrange(1, 4))
        ]
        amount = round(chance.uniform(1, 500), 2) * (-1 if chance.random() < 0.004 else 1)
        yield NewMessage(
            "orders.created",
            msgspec.json.encode(Order(number, customer, amount, lines)),
            idem_key=f"order-{number}",
            sticky_key=customer,
            principal=chance.choice(SHOPS),
            correlation_id=f"visit-{chance.randrange(10**6):06}",
            content_type="application/json",
            attrs={
                "currency": chance.choice(("EUR", "PEN", "JPY")),
                "region": chance.choice(("eu", "sa", "ap")),
            },
        )


def follow_up(message: ReceivedMessage, topic: str) -> NewMessage:
    """Return the message that a handler sends when it is done with another one."""
    return NewMessage(
        topic,
        message.payload,
        sticky_key=msgspec.json.decode(message.payload, type=Order).customer,
        principal=message.principal,
        correlation_id=message.correlation_id,
        causality_parent=message.message_id,
        content_type="application/json",
        attrs={name: value for name, value in message.attrs.items() if name in ("currency", "region")},
    )


# -- the week before ---


async def fill_shop(store: str) -> None:
    """Fill a store with the week of the shop before now."""
    clock, chance = PastClock(sum(minutes for minutes, _, _ in STEPS)), random.Random(SEED)
    settings = OwnerSettings(durability="relaxed").check()
    place = open_owner_store(store, settings)
    async with own_mailbox(place, MAILBOX, settings, 0, clock=clock) as mailbox:
        await _prepare(mailbox)
        number, is_redriven = 0, False
        for minutes, length, orders in STEPS:
            for _ in range(minutes // length):
                count = chance.randrange(orders // 2, orders * 2)
                await _pass_step(mailbox, clock, chance, [*generate(chance, number, count)], length * MINUTE)
                number += count
                if clock.hours_left < REDRIVE and not is_redriven:
                    is_redriven = True
                    await _redrive(mailbox)
        await _finish(mailbox, chance)


async def _prepare(mailbox: OwnedMailbox) -> None:
    for topic, _, _ in STAGES:
        await mailbox.set_topic_policy(topic, POLICY)
    await mailbox.set_topic_policy("mail.requested", {**POLICY, "fair_keys": True})
    await mailbox.set_subscription("billing", SubscriptionFilter(("orders.paid",)))


async def _pass_step(
    mailbox: OwnedMailbox,
    clock: PastClock,
    chance: random.Random,
    orders: Sequence[NewMessage],
    seconds: float,
) -> None:
    """Let a part of the week pass: orders come, and are handled a few at a time."""
    before = clock.hours_left
    await mailbox.send_batch(orders)
    if chance.random() < 0.3:
        level = NewMessage(
            "stock.changed", b'{"sku": "SKU-00037", "left": 12}', content_type="application/json"
        )
        await mailbox.send_message(level)
    is_incident = INCIDENT[1] < before < INCIDENT[0]
    for topic, handler, following in STAGES:
        clock.advance(chance.uniform(0.02, 0.3) * (40 if is_incident else 1))
        consumer = f"shop/{handler}@web-{chance.randrange(1, 4)}:{chance.randrange(3) + 4711}"
        while deliveries := await mailbox.receive_messages(topic, max_messages=12, consumer=consumer):
            clock.advance(chance.lognormvariate(-2.5, 0.8))
            share = 0.7 if is_incident and topic == "orders.paid" else 0.006
            failed = [each for each in deliveries if chance.random() < share or _fails_always(topic, each)]
            failed += [each for each in deliveries if each not in failed and _is_poison(topic, each)]
            for each in failed:
                await _fail(mailbox, topic, handler, each)
            done = [each for each in deliveries if each not in failed]
            await mailbox.ack_messages([each.receipt for each in done])
            if following and done:
                await mailbox.send_batch([follow_up(each, following) for each in done])
    clock.advance(seconds - (before - clock.hours_left) * 3_600)


def _is_poison(topic: str, message: ReceivedMessage) -> bool:
    return topic == "orders.created" and msgspec.json.decode(message.payload, type=Order).amount < 0


def _fails_always(topic: str, message: ReceivedMessage) -> bool:
    """Return whether a message can't be handled, as some customers have no address or a closed account."""
    customer = int(msgspec.json.decode(message.payload, type=Order).customer.partition("-")[2])
    return customer % 97 == [each for each, _, _ in STAGES].index(topic)


async def _fail(mailbox: OwnedMailbox, topic: str, handler: str, message: ReceivedMessage) -> None:
    error = ERRORS[topic]
    action: NackAction = "retry"
    if _is_poison(topic, message):
        amount = msgspec.json.decode(message.payload, type=Order).amount
        error, action = f"Reject: the amount {amount} is negative", "reject"
    traceback = TRACEBACK.format(handler=handler, error=error)
    await mailbox.nack_messages([message.receipt], reason=error, action=action, traceback=traceback)


async def _redrive(mailbox: OwnedMailbox) -> None:
    """Redrive the messages that were dead-lettered while the warehouse did not answer."""
    spec = RedriveSpec(topics=("orders.paid",), reasons=("max_attempts",))
    job = await mailbox.start_redrive(spec, principal="anna@ops")
    async with asyncio.timeout(MINUTE):
        while (await mailbox.get_redrive(job.job_id)).is_active:  # noqa: ASYNC110  # jobs have no event
            await asyncio.sleep(0.01)


async def _finish(mailbox: OwnedMailbox, chance: random.Random) -> None:
    """Add other things that the console shows: messages in flight and delayed, a paused topic, schedules."""
    await mailbox.set_subscription(
        "reports", SubscriptionFilter(("orders.*",), {"region": "eu", "currency": "PEN"}), start=0
    )
    await mailbox.send_batch([*generate(chance, 10**6, 4)])
    await mailbox.receive_messages(
        "orders.created", max_messages=3, visibility_ms=1_800_000, consumer="shop/audit"
    )
    reminder = NewMessage("mail.reminders", b'{"cart": "c-17"}', content_type="application/json")
    await mailbox.send_batch(
        [msgspec.structs.replace(reminder, deliver_after_ms=each * DAY_MS // 4) for each in range(1, 8)]
    )
    await mailbox.pause_topic("stock.changed")
    await mailbox.set_schedule("invoices", ScheduleSpec("invoices", "0 3 * * *", timezone="Europe/Berlin"))
    await mailbox.set_schedule("newsletter", ScheduleSpec("mail.newsletter", "0 9 * * MON"))
    await mailbox.pause_schedule("newsletter")
    await mailbox.run_schedule("invoices")


# -- the shop from now on ---

worker = Worker("shop")
_chance = random.Random()


@worker.schedule(every("2s"), name="customers", missed="skip")
async def order() -> None:
    """Send the orders of customers."""
    mailbox = current_mailbox.get()
    assert mailbox is not None, "a handler runs"
    orders = [*generate(_chance, _chance.randrange(10**6, 10**9), _chance.randrange(1, 9))]
    await mailbox.send_batch(orders)


async def _work(message: ReceivedMessage, error: Exception, following: str) -> None:
    """Handle a message for a while; fail now and then."""
    await asyncio.sleep(min(1.0, _chance.lognormvariate(-2.5, 0.8)))
    if _chance.random() < 0.02:
        raise error
    mailbox = current_mailbox.get()
    if following and mailbox is not None:
        await mailbox.send_message(follow_up(message, following))


@worker.consumer("orders.created", concurrency=4)
async def charge(order: Order, message: ReceivedMessage) -> None:
    """Charge an order."""
    if order.amount < 0:
        raise Reject(f"the amount {order.amount} is negative")
    await _work(message, ConnectionError("bank.internal:443 refused the connection"), "orders.paid")


@worker.consumer("orders.paid", concurrency=4)
async def pack(message: ReceivedMessage) -> None:
    """Have an order packed."""
    refusal = ConnectionError("warehouse.internal:5432 refused the connection")
    await _work(message, refusal, "orders.shipped")


@worker.consumer("orders.shipped", concurrency=4)
async def notify(message: ReceivedMessage) -> None:
    """Tell the customer."""
    await _work(message, KeyError("address"), "mail.requested")


@worker.consumer("mail.requested", concurrency=4)
async def send_mail(message: ReceivedMessage) -> None:
    """Send a mail."""
    await _work(message, TimeoutError("the mail server did not answer within 30 s"), "")


@worker.consumer("billing", concurrency=4)
async def book(message: ReceivedMessage) -> None:
    """Book a payment."""
    await _work(message, ValueError("the account 4711 is closed"), "")


def show_shop(session: Session) -> None:
    """Serve the console of the shop, which refuses all changes, until interrupted; then remove the shop."""
    # SIGTERM acts like an interrupt, which cancels asyncio's tasks, so that the folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with TemporaryDirectory(prefix="postroom-demo-") as folder:
        store = str(Path(folder) / "shop.db")
        session.out.note("Making a shop with a week of orders.")
        asyncio.run(fill_shop(store))
        sections: dict[str, dict[str, bool]] = {name: {} for name in session.settings.sections} | {
            "console": {"read_only": True}
        }
        settings = Settings(
            store=store, mailbox=MAILBOX, sections=sections
        )  # the user's settings are for other stores
        run_parts(
            Session("demo", settings, session.out),
            lambda: {"shop": worker},
            http=CONSOLE_HTTP,
            views=build_views(store),
            reload=False,
            stop_ms=STOP_MS,
            metrics_port=None,
            apply=False,
        )


def build_views(store: str) -> bool:
    """Build the read models; return whether they are installed."""
    try:
        from postroom.adapters.compose.projections import rebuild_projections

        rebuild_projections(store)
    except (ImportError, MissingExtra, Unavailable):
        return False
    return True
