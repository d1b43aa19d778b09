"""A shop in FastAPI that sends each order to a mailbox, which all its workers share.

gunicorn -w 4 -k uvicorn_worker.UvicornWorker docs.examples.web.fastapi_shop:app
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from postroom import NewMessage, PostroomError, connect


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect in each worker, which is after the fork."""
    async with connect(os.environ.get("SHOP_MAILBOX", "shop.db"), timeout_ms=10_000) as mailbox:
        app.state.mailbox = mailbox
        yield


app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """The body of a request to place an order."""

    item: str


@app.put("/orders/{order_id}", status_code=202)
async def place_order(order_id: str, order: Order, request: Request) -> dict[str, object]:
    """Accept an order once it is durable; idempotent, so that a client may repeat the request."""
    payload = json.dumps({"order": order_id, "item": order.item}).encode()
    message = NewMessage(topic="orders", payload=payload, idem_key=order_id)
    sent = await request.app.state.mailbox.send_message(message)
    return {"message": sent.message_id, "duplicate": sent.duplicate}


@app.exception_handler(PostroomError)
async def refuse(request: Request, error: PostroomError) -> JSONResponse:
    """Answer with the status of the error: 409 for another order of this id, 503 for try again."""
    return JSONResponse({"code": error.code, "message": str(error)}, error.status)
