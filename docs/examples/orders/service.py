"""A shop that takes orders and ships them, with an outbox and an inbox.

PUT /orders/{id} stores an order and records an event, in one transaction. `postroom inbox consume` posts
events to /handle, which stores one shipment per order, in one transaction too.
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

from postroom import (
    AsyncOutbox,
    HandlerRequest,
    NewEvent,
    Unauthenticated,
    current_transaction,
    inbox,
    pipeline,
    transaction,
    verify_signature,
)

Kind = TypeVar("Kind", bound=msgspec.Struct)

SIGNING_KEY = os.environ["POSTROOM_INBOX__SIGNING_KEY"]
engine = create_async_engine(
    os.environ["POSTROOM_MESSAGING__DATABASE"].replace("postgresql://", "postgresql+psycopg://")
)
sessions = async_sessionmaker(engine)
outbox = AsyncOutbox(notify=True)


class Base(DeclarativeBase):
    """Base of the shop's tables, which are in the same database as those of Postroom."""


class Order(Base):
    """An order of a customer."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    item: Mapped[str]


class Shipment(Base):
    """A shipment; no constraint prevents a second one of an order, only the inbox."""

    __tablename__ = "shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str]
    item: Mapped[str]


class NewOrder(msgspec.Struct):
    """The body of a request to place an order."""

    item: str


class OrderPlaced(msgspec.Struct):
    """The payload of the event."""

    order_id: str
    item: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Create the shop's tables if they are missing."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.put("/orders/{order_id}")
async def place_order(order_id: str, request: Request) -> dict[str, str]:
    """Store an order and record its event; idempotent, so that a client may repeat the request."""
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
    """Handle an event: 200 means processed, 422 poison, 500 failed."""
    body = await request.body()
    try:
        verify_signature(request.headers, body, SIGNING_KEY)
    except Unauthenticated as error:
        raise HTTPException(401, str(error)) from error
    await handle_once(read(body, HandlerRequest))
    return Response()


async def ship(event: HandlerRequest) -> None:
    """Ship an order; the middlewares handle transactions and duplicates."""
    try:
        order = msgspec.convert(event.payload, OrderPlaced)
    except msgspec.ValidationError as error:
        raise HTTPException(422, str(error)) from error
    current_transaction().add(Shipment(order_id=order.order_id, item=order.item))


handle_once = pipeline(transaction(sessions), inbox(), ship)


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Return the decoded body, or respond with 422."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise HTTPException(422, str(error)) from error
