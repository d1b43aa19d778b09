"""Clients of Amazon SQS: boto3, and the same requests written and signed by hand, in turns.

Both wait for each answer, which is durable, over connections that they keep, and the server verifies their
signatures. `cpu` is the time of the client's process per request: the difference is what boto3 costs.
`server_cpu` is the server's.
"""

import hashlib
import hmac
import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.load.owners import Owner
from tests.support.servers.http import PostroomServer
from tests.support.sqs import SQS, access_key, sqs_client, token

BODY = "x" * 200
CALLERS = (1, 16)
STEPS = ("send", "receive", "delete")
Actions = tuple[Callable[[], None], Callable[[], str], Callable[[str], None]]
"""Sends a message; receives one, and returns its handle; deletes one."""


class Size(NamedTuple):
    """How much is measured.

    Arguments:
        messages: sent, received and deleted by each caller in a turn.
        turns: of boto3 and of requests by hand.
    """

    messages: int = 300
    turns: int = 5


SIZE = Size()


class RawClient:
    """Requests of the JSON protocol over one connection, signed by hand (Signature Version 4)."""

    def __init__(self, url: str, key: str, secret: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host)
        self._time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self._scope = f"{self._time[:8]}/us-east-1/sqs/aws4_request"
        self._key, self._secret = key, f"AWS4{secret}".encode()
        for part in self._scope.split("/"):
            self._secret = hmac.digest(self._secret, part.encode(), "sha256")

    def prepare(self, action: str, parameters: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of a request."""
        body, target = json.dumps(parameters).encode(), f"AmazonSQS.{action}"
        signed = "host;x-amz-date;x-amz-target"
        request = (
            f"POST\n/\n\nhost:{self._host}\nx-amz-date:{self._time}\nx-amz-target:{target}\n\n{signed}\n"
            + hashlib.sha256(body).hexdigest()
        )
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self._time}\n{self._scope}\n{digest}"
        signature = hmac.new(self._secret, text.encode(), "sha256").hexdigest()
        return body, {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Date": self._time,
            "X-Amz-Target": target,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={self._key}/{self._scope}, "
            f"SignedHeaders={signed}, Signature={signature}",
        }

    def request(self, body: bytes, headers: dict[str, str]) -> bytes:
        """Return the answer to a request."""
        self._connection.request("POST", "/", body, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return text


def by_boto3(url: str, queue: str, key: str, secret: str) -> Actions:
    """Return the actions by boto3."""
    client = sqs_client(url, "json", key, secret)

    def send() -> None:
        client.send_message(QueueUrl=queue, MessageBody=BODY)

    def receive() -> str:
        (message,) = client.receive_message(QueueUrl=queue)["Messages"]
        return str(message["ReceiptHandle"])

    def delete(handle: str) -> None:
        client.delete_message(QueueUrl=queue, ReceiptHandle=handle)

    return send, receive, delete


def by_hand(url: str, queue: str, key: str, secret: str) -> Actions:
    """Return the actions of a client without an SDK, which signs sends and receives in advance."""
    client = RawClient(url, key, secret)
    sent = client.prepare("SendMessage", {"QueueUrl": queue, "MessageBody": BODY})
    received = client.prepare("ReceiveMessage", {"QueueUrl": queue})

    def send() -> None:
        client.request(*sent)

    def receive() -> str:
        (message,) = json.loads(client.request(*received))["Messages"]
        return str(message["ReceiptHandle"])

    def delete(handle: str) -> None:
        client.request(*client.prepare("DeleteMessage", {"QueueUrl": queue, "ReceiptHandle": handle}))

    return send, receive, delete


def turn(callers: Sequence[Actions], count: int, server: Owner) -> list[float]:
    """Return the requests per second of each step, and the CPU times per request (ms): client and server."""
    handles: list[list[str]] = [[] for _ in callers]

    def send(number: int) -> None:
        for _ in range(count):
            callers[number][0]()

    def receive(number: int) -> None:
        for _ in range(count):
            handles[number].append(callers[number][1]())

    def delete(number: int) -> None:
        for handle in handles[number]:
            callers[number][2](handle)

    rates = []
    requests, cpu, server_cpu = count * len(callers), time.process_time(), server.cpu_seconds()
    with ThreadPoolExecutor(len(callers)) as pool:
        for step in (send, receive, delete):
            with Stopwatch() as watch:
                list(pool.map(step, range(len(callers))))
            rates.append(requests / watch.seconds)
    spent = time.process_time() - cpu, server.cpu_seconds() - server_cpu
    return rates + [each * 1_000 / (requests * len(STEPS)) for each in spent]


def measure(figures: Figures, folder: Path, _: int, size: Size = SIZE) -> None:
    """Measure boto3 and requests by hand in turns, by one caller and by several threads."""
    token(folder, "rotate")
    with PostroomServer(folder, sqs=SQS, console=False, dev=False) as server:
        owner = Owner(server.process.pid, server.address, server.address)
        url, key = server.addresses[1], access_key(folder, "--operation", "all")
        queue = str(sqs_client(url, "json", *key).create_queue(QueueName="bench")["QueueUrl"])
        for count in CALLERS:
            made = {
                "boto3": [by_boto3(url, queue, *key) for _ in range(count)],
                "by_hand": [by_hand(url, queue, *key) for _ in range(count)],
            }
            turns: dict[str, list[list[float]]] = {name: [] for name in made}
            for _ in range(size.turns):
                for name, callers in made.items():
                    each = max(1, size.messages // count)
                    turns[name].append(turn(callers, each, owner))
            for name, results in turns.items():
                values = list(map(median, zip(*results, strict=True)))
                for step, rate in zip(STEPS, values, strict=False):
                    figures.add(f"sqs.{name}.{step}.{count}", rate, "requests/s")
                figures.add(f"sqs.{name}.cpu.{count}", values[-2], "ms")
                figures.add(f"sqs.{name}.server_cpu.{count}", values[-1], "ms")


MEASUREMENTS = {"sqs": measure}
