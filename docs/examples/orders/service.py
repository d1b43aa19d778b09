"""A shop that takes orders and ships them: events leave through its outbox and come in through its inbox.

PUT /orders/{id} stores an order and records an event about it, in one transaction. POST /handle is where
`postroom inbox consume` brings events; it stores a shipment, once for each order, in one transaction too.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postroom.adapters.compose.inbox import current_transaction, inbox, pipeline, transaction
from postroom.adapters.compose.outbox import AsyncOutbox, NewEvent
from postroom.adapters.http.signature import verify_signature
from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.errors import Unauthenticated

Kind = TypeVar("Kind", bound=msgspec.Struct)

SIGNING_KEY = os.environ["POSTROOM_INBOX__SIGNING_KEY"]
engine = create_async_engine(
    os.environ["POSTROOM_MESSAGING__DATABASE"].replace("postgresql://", "postgresql+psycopg://")
)
sessions = async_sessionmaker(engine)
outbox = AsyncOutbox(notify=True)


class Base(DeclarativeBase):
    """The tables of the shop's own business; those of Postroom stand beside them."""


class Order(Base):
    """What a customer wants."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    item: Mapped[str]


class Shipment(Base):
    """What left the warehouse; nothing but the inbox keeps an order from being shipped twice."""

    __tablename__ = "shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str]
    item: Mapped[str]


class NewOrder(msgspec.Struct):
    """What a customer sends."""

    item: str


class OrderPlaced(msgspec.Struct):
    """What the event says."""

    order_id: str
    item: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Make the shop's tables where they are missing."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.put("/orders/{order_id}")
async def place_order(order_id: str, request: Request) -> dict[str, str]:
    """Take an order; to send it again, after a crash for example, changes nothing."""
    order = read(await request.body(), NewOrder)
    async with sessions.begin() as session:
        placed = await session.scalar(
            insert(Order).values(id=order_id, item=order.item).on_conflict_do_nothing().returning(Order.id)
        )
        if placed is not None:
            event = NewEvent(
                aggregate_type="order",
                aggregate_id=order_id,
                event_type="order_placed",
                payload=OrderPlaced(order_id, order.item),
            )
            await outbox.record(session, event)
    return {"order": order_id}


@app.post("/handle")
async def handle(request: Request) -> Response:
    """Deal with an event: 200 says that it is done, 422 that it never can be, 500 to try again."""
    body = await request.body()
    try:
        verify_signature(request.headers, body, SIGNING_KEY)
    except Unauthenticated as error:
        raise HTTPException(401, str(error)) from error
    await handle_once(read(body, HandlerRequest))
    return Response()


async def ship(event: HandlerRequest) -> None:
    """Ship an order; this knows nothing of transactions and repetitions."""
    try:
        order = msgspec.convert(event.payload, OrderPlaced)
    except msgspec.ValidationError as error:
        raise HTTPException(422, str(error)) from error
    current_transaction().add(Shipment(order_id=order.order_id, item=order.item))


handle_once = pipeline(transaction(sessions), inbox(), ship)


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Return what a body says, or answer with 422."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise HTTPException(422, str(error)) from error
