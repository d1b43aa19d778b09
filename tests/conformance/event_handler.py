"""What every event handler promises: an adapter's test class inherits the suite and brings a `Service`."""

import asyncio
from abc import ABC, abstractmethod

import msgspec
import pytest

from postroom.application.ports.inbox import EventHandler, HandlerRequest


class Service(ABC):
    """Code that deals with events, and answers as a test wants it to."""

    def __init__(self) -> None:
        self.seen: list[HandlerRequest] = []
        self.answers: list[str] = []
        """What to do with the next events: `ok`, `duplicate`, `poison`, `fail`; later ones are `ok`."""

    def next_answer(self) -> str:
        return self.answers.pop(0) if self.answers else "ok"

    @abstractmethod
    def handler(self) -> EventHandler:
        """Return the adapter that leads to this service."""


def request(number: int = 1, payload: object = None) -> HandlerRequest:
    return HandlerRequest(
        message_id=f"550e8400-e29b-41d4-a716-{number:012}",
        subject="vibespro.event.vibe_created.v1",
        event_type="vibe_created",
        event_version=1,
        occurred_at="2025-12-28T22:00:00Z",
        correlation_id="0193f0f2-0000-7000-8000-000000000001",
        causation_id=None,
        payload={"total": 5} if payload is None else payload,
    )


class EventHandlerConformance:
    async def test_the_request_arrives_as_it_is(self, service: Service) -> None:
        payload = {"ü": [1, 2.5, None, True, "\U0001f4ee"], "deep": {"er": {}}}
        await service.handler().handle(request(payload=payload))
        assert service.seen == [request(payload=payload)]

    async def test_a_payload_that_is_not_json_arrives_byte_for_byte(self, service: Service) -> None:
        given = msgspec.structs.replace(request(), payload=bytes(range(256)), content_type="image/png")
        await service.handler().handle(given)
        assert service.seen == [given]

    @pytest.mark.parametrize(
        ("answer", "outcome"),
        [("ok", "processed"), ("duplicate", "already_processed"), ("poison", "poison"), ("fail", "failed")],
    )
    async def test_an_answer_means(self, service: Service, answer: str, outcome: str) -> None:
        service.answers = [answer]
        result = await service.handler().handle(request())
        assert result.outcome == outcome
        assert (result.reason is None) == (outcome in ("processed", "already_processed"))

    async def test_a_reason_tells_what_the_handler_said(self, service: Service) -> None:
        service.answers = ["poison", "fail"]
        for _ in range(2):
            result = await service.handler().handle(request())
            assert result.reason is not None
            assert "because" in result.reason

    async def test_after_a_failure_the_next_event_is_handled(self, service: Service) -> None:
        service.answers = ["fail"]
        handler = service.handler()
        assert (await handler.handle(request(1))).outcome == "failed"
        assert (await handler.handle(request(2))).outcome == "processed"

    async def test_many_events_are_handled_at_once(self, service: Service) -> None:
        handler = service.handler()
        results = await asyncio.gather(*(handler.handle(request(n)) for n in range(100)))
        assert {result.outcome for result in results} == {"processed"}
        assert len(service.seen) == 100

    async def test_closing_twice_is_fine(self, service: Service) -> None:
        handler = service.handler()
        await handler.handle(request())
        await handler.close()
        await handler.close()
