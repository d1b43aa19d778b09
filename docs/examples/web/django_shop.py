"""The same shop in Django, whose settings are in this file.

gunicorn -w 4 docs.examples.web.django_shop:application
"""

import json
import os
from functools import cache

import msgspec
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_http_methods

from postroom import NewMessage, PostroomError, SyncMailbox, connect

settings.configure(ALLOWED_HOSTS=["127.0.0.1", "localhost"], ROOT_URLCONF=__name__)


@cache
def shop_mailbox() -> SyncMailbox:
    """Connect at the first request of each worker, which is after the fork."""
    return connect(os.environ.get("SHOP_MAILBOX", "shop.db"), timeout_ms=10_000).sync()


class Order(msgspec.Struct):
    """The body of a request to place an order."""

    item: str


@require_http_methods(["PUT"])
def place_order(request: HttpRequest, order_id: str) -> JsonResponse:
    """Accept an order once it is durable; idempotent, so that a client may repeat the request."""
    try:
        order = msgspec.json.decode(request.body, type=Order)
    except msgspec.DecodeError as error:
        return JsonResponse({"message": str(error)}, status=422)
    payload = json.dumps({"order": order_id, "item": order.item}).encode()
    try:
        sent = shop_mailbox().send_message(NewMessage(topic="orders", payload=payload, idem_key=order_id))
    except PostroomError as error:
        return JsonResponse({"code": error.code, "message": str(error)}, status=error.status)
    return JsonResponse({"message": sent.message_id, "duplicate": sent.duplicate}, status=202)


urlpatterns = [path("orders/<str:order_id>", place_order)]
application = get_wsgi_application()
