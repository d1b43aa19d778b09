"""Requests to JetStream, whose JSON API also has fields that nats-py lacks."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from postroom.adapters.nats.client import SupervisedClient
from postroom.domain.errors import Unavailable

API = "$JS.API"
ATTEMPT_SECONDS = 1.5
STREAM_NOT_FOUND = 10059
NO_HEADERS = b"NATS/1.0\r\n\r\n"
_REQUEST_SECONDS = 5.0


class ApiError(Exception):
    """JetStream answered with an error.

    Arguments:
        is_final: whether a repetition would be refused, too.
    """

    def __init__(self, number: int, reason: str, *, is_final: bool) -> None:
        super().__init__(f"{reason} (NATS error {number})")
        self.number = number
        self.is_final = is_final


class JetStreamApi:
    """Client of JetStream's API.

    Arguments:
        client: a connection to the servers.
    """

    def __init__(self, client: SupervisedClient) -> None:
        self.client = client

    async def request(
        self,
        subject: str,
        payload: bytes,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        seconds: float = ATTEMPT_SECONDS,
    ) -> dict[str, Any]:
        """Return the answer to a request of the API, or to a message for a stream, which is sent once.

        Arguments:
            deadline: time of the event loop.
            seconds: to wait for the answer, if the deadline is later.

        Raises: ApiError when JetStream refuses it; nats.errors.Error, OSError or TimeoutError without an
            answer, in which case it may have been processed.
        """
        seconds = min(seconds, deadline - asyncio.get_running_loop().time())
        if seconds <= 0:
            raise TimeoutError
        lines = "".join(f"{name}:{value}\r\n" for name, value in (headers or {}).items())
        encoded = f"NATS/1.0\r\n{lines}\r\n".encode() if headers else NO_HEADERS
        reply = await self.client.request_bytes(subject.encode(), encoded, payload, seconds)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if error := answer.get("error"):
            raise ApiError(
                error.get("err_code", 0),
                error.get("description", "no reason given"),
                is_final=error.get("code", 500) < 500,
            )
        return answer

    async def ask(self, where: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request of the API.

        Raises: ApiError when JetStream refuses it, Unavailable when no server answers.
        """
        body = b"" if request is None else msgspec.json.encode(request)
        deadline = asyncio.get_running_loop().time() + _REQUEST_SECONDS
        try:
            return await self.request(f"{API}.{where}", body, deadline, seconds=_REQUEST_SECONDS)
        except (NatsError, OSError, TimeoutError) as error:
            raise Unavailable(
                f"JetStream did not reply to {where}: {str(error) or type(error).__name__}; check that the "
                "servers run with JetStream on and that their cluster has a leader."
            ) from error

    async def find(
        self, where: str, request: Mapping[str, Any] | None = None, absent: Collection[int] = ()
    ) -> dict[str, Any]:
        """Return the answer to a query of the API; empty when it has an error of one of the numbers `absent`.

        Raises: Unavailable when it has another error, or no server answers.
        """
        try:
            return await self.ask(where, request)
        except ApiError as refused:
            if refused.number in absent:
                return {}
            raise Unavailable(f"NATS could not answer {where}: {refused}; try again.") from refused

    async def find_stream(self, name: str) -> dict[str, Any]:
        """Return configuration, state and servers of a stream; empty if it does not exist.

        Raises: Unavailable when no server answers.
        """
        return await self.find(f"STREAM.INFO.{name}", absent=[STREAM_NOT_FOUND])
