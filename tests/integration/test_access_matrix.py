"""Every operation of HTTP and gRPC, by every scope of a token and every kind of identifier."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from postroom.adapters.grpc.calls import DETAILS_KEY, METHODS
from postroom.domain.capability.rights import Expires, NotBefore, Right, Topics
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.message import Receipt
from postroom.domain.names import message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import ACTIVE
from tests.support.access import MemoryPlace, controlled_mailbox
from tests.support.access_matrix import (
    ALLOWED,
    FOREIGN,
    OWN,
    UNKNOWN,
    Case,
    Known,
    Scope,
    expected,
    grpc_cases,
    http_cases,
)
from tests.support.messages import message
from tests.support.surfaces import served
from tests.support.waiting import until

SECONDS = 240
"""Deadline of each call."""
CONTRACT = Path(__file__).parents[2] / "docs/reference/openapi.json"
PUBLIC = {"GET /healthz", "GET /readyz", "GET /openapi.json", "GET /v1/errors/{code}"}
ALL = frozenset(Right)
MALFORMED, DEFECT = "E_SCHEMA", "E_INTERNAL"

Call = Callable[[Case, str | None], Awaitable[tuple[list[str], str]]]
"""Make a call with a token; return the code of each answer, and all that was answered as text."""


def refused_tokens(place: MemoryPlace) -> dict[str, tuple[Scope, str | None]]:
    """Return tokens that are not accepted at all."""
    now = place.clock.wall() // 1_000
    valid, revoked = place.issue(), place.issue()
    place.capabilities.revoke(Token.decode(revoked).read_identifier().nonce)
    tokens = {
        "none": None,
        "junk": "junk",
        "altered": valid[:-6] + ("AAAAAA" if not valid.endswith("AAAAAA") else "BBBBBB"),
        "expired": place.issue(Expires(now)),
        "not yet valid": place.issue(NotBefore(now + 1_000)),
        "revoked": revoked,
        "attenuated from a revoked one": attenuate(Token.decode(revoked), Topics((OWN,))).encode(),
    }
    return {name: (Scope(None), token) for name, token in tokens.items()}


def limited_tokens(place: MemoryPlace) -> dict[str, tuple[Scope, str | None]]:
    """Return tokens that are limited to a topic or to another mailbox."""
    wide = Token.decode(place.issue())
    return {
        "mailbox": (Scope(ALL, mailbox=False), place.issue(mailboxes=["another*"])),
        "topic": (Scope(ALL, topics=True), place.issue(topics=["orders.*"])),
        "topic by a caveat": (Scope(ALL, topics=True), attenuate(wide, Topics((OWN, "orders.*"))).encode()),
    }


def tokens_of_operations(place: MemoryPlace) -> dict[str, tuple[Scope, str | None]]:
    """Return tokens of one operation each, of all but one each, and of all."""
    sets = {f"only {each}": frozenset({each}) for each in Right}
    sets |= {f"all but {each}": ALL - {each} for each in Right}
    sets["all"] = ALL
    return {name: (Scope(each), place.issue(operations=sorted(each))) for name, each in sets.items()}


GROUPS = {"refused": refused_tokens, "limited": limited_tokens, "operations": tokens_of_operations}


async def make_known(place: MemoryPlace) -> dict[str, Known]:
    """Fill two topics, and return what may be named of each, and of none."""
    known: dict[str, Known] = {}
    for topic in (OWN, FOREIGN):
        await place.mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=1))
        sent = [await place.mailbox.send_message(message(topic=topic)) for _ in range(2)]
        dead, in_flight = await place.mailbox.receive_messages(topic, visibility_ms=3_600_000)
        await dead.nack()
        assert {dead.message_id, in_flight.message_id} == {each.message_id for each in sent}
        known[topic] = Known(in_flight.message_id, in_flight.receipt, dead.message_id)
    stream = message_stream(place.mailbox.name, UNKNOWN)
    known[UNKNOWN] = Known(UNKNOWN, Receipt(stream, 2, known[OWN].receipt.epoch), UNKNOWN)
    return known


@asynccontextmanager
async def http_call(url: str) -> AsyncIterator[Call]:
    """Call over HTTP."""
    async with ClientSession(url) as session:

        async def call(case: Case, token: str | None) -> tuple[list[str], str]:
            method, target, body = case.request
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with session.request(method, target, json=body, headers=headers) as answer:
                if case.name == "POST /v1/recv/stream":
                    text = (await answer.content.readline()).decode()
                else:
                    text = await answer.text()
            assert answer.status < 500, text
            if answer.content_type == "text/plain":
                return [ALLOWED], ""  # metrics are of the mailbox as a whole
            content = json.loads(text or "{}")
            if answer.status >= 400:
                return [content["code"]] * (len(case.topics) if case.alone else 1), text
            if case.alone:
                return [each.get("error", {}).get("code", ALLOWED) for each in content["results"]], text
            return [content.get("error", {}).get("code", ALLOWED)], text

        yield call


@asynccontextmanager
async def grpc_call(url: str) -> AsyncIterator[Call]:
    """Call over gRPC."""
    async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:

        async def call(case: Case, token: str | None) -> tuple[list[str], str]:
            method = METHODS[case.name]
            make: Any = channel.unary_stream if method.is_stream else channel.unary_unary
            calling = make(method.path, method.request.SerializeToString, method.response.FromString)
            metadata = [] if token is None else [("authorization", f"Bearer {token}")]
            count = len(case.topics) if case.alone else 1
            try:
                running = calling(case.request, metadata=metadata, timeout=SECONDS)
                answer = await (running.read() if method.is_stream else running)
            except grpc.aio.AioRpcError as error:
                status, info = Status(), ErrorInfo()
                status.ParseFromString(dict(error.trailing_metadata() or ())[DETAILS_KEY])
                status.details[0].Unpack(info)
                return [info.reason] * count, str(status)  # a defect has no details, or E_INTERNAL
            if method.is_stream:
                running.cancel()
            text = str(answer)
            return [each.error.code for each in answer.results] if case.alone else [ALLOWED], text

        yield call


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_each_call_is_permitted_or_refused_as_the_scope_of_its_token_says(
    protocol: str, group: str
) -> None:
    """A refused call changes nothing, and the answers to a token of one topic name no other topic."""
    differences: list[tuple[object, ...]] = []
    async with controlled_mailbox() as place:
        known = await make_known(place)
        access = place.control.open_session
        cases, make_call = (
            (http_cases(known), http_call) if protocol == "http" else (grpc_cases(known), grpc_call)
        )
        async with served(place.mailbox, protocol, access=lambda *_: access) as url, make_call(url) as call:
            for name, (scope, token) in GROUPS[group](place).items():
                await place.control.refresh()
                await place.mailbox.send_batch([message(topic=OWN) for _ in range(8)])
                before = await foreign_state(place)
                for case in cases:
                    head, audited = await head_of(place), len(place.filters)
                    in_flight = await in_flight_of(place)
                    codes, text = await call(case, token)
                    if "stream" in case.name:  # what it delivered is returned after its end
                        async with asyncio.timeout(SECONDS):
                            while await in_flight_of(place) != in_flight:
                                await asyncio.sleep(0)
                    if "redrive" in case.name:  # a job that it started goes on after its answer
                        await until(lambda: not are_jobs_active(place))
                    wanted = expected(scope, case)
                    found = [each if each.startswith("E_CAP") else ALLOWED for each in codes]
                    shown = (name, case.name, case.topics, str(case.request))
                    if found != wanted:
                        differences.append((*shown, f"expected {wanted}, was {codes}"))
                    if all(wanted) and (await head_of(place), len(place.filters)) != (head, audited):
                        differences.append((*shown, "it was refused and had an effect"))
                    if {MALFORMED, DEFECT} & {*codes}:
                        differences.append((*shown, text))
                    if scope.topics and FOREIGN in text:
                        differences.append((*shown, f"it tells of another topic: {text}"))
                if scope.topics and await foreign_state(place) != before:
                    differences.append((name, "another topic was changed"))
    assert not differences, "\n".join(map(str, differences))


def are_jobs_active(place: MemoryPlace) -> bool:
    """Return whether a redrive job is at work."""
    return any(each.status in ACTIVE for each in place.mailbox.engine.mailbox.redrives.values())


async def head_of(place: MemoryPlace) -> tuple[object, ...]:
    """Return the ends of the logs of the mailbox and of the capabilities."""
    return (await place.mailbox.get_backlog()).position, place.log.head()


async def in_flight_of(place: MemoryPlace) -> int:
    """Return how many messages are in flight."""
    return sum(each.in_flight for each in (await place.mailbox.get_backlog()).shards)


async def foreign_state(place: MemoryPlace) -> object:
    """Return what there is of the topic that limited tokens do not cover."""
    policy = await place.mailbox.get_topic_policy(FOREIGN)
    return (await place.mailbox.get_backlog(FOREIGN)).shards, policy


async def test_the_cases_are_all_the_calls_of_the_surfaces() -> None:
    async with controlled_mailbox() as place:
        known = await make_known(place)
    assert {each.name for each in grpc_cases(known)} == METHODS.keys()
    routes = {
        f"{method.upper()} {path}"
        for path, operations in json.loads(CONTRACT.read_text())["paths"].items()
        for method in operations
    }
    assert {each.name for each in http_cases(known)} == routes - PUBLIC
