"""Target: requests of SQS clients: a line with the action, or `form` of the query protocol, and the body."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from xml.etree import ElementTree

from postroom.adapters.compose import open_mailbox
from postroom.adapters.sqs.app import SqsApp
from postroom.adapters.sqs.errors import SqsError
from postroom.adapters.sqs.signature import Request, read_signature
from tests.fuzz.services import INPUTS_PER_MAILBOX, Connection, stopping_service
from tests.fuzz.target import Check

URL = "http://localhost/000000000000/orders"
_ARN = b"arn:aws:sqs:us-east-1:000000000000:orders"
_URL = URL.encode()
_ATTRIBUTE = b'{"a": {"DataType": "Number.int", "StringValue": "-1.5e3"}}'
_RECEIPT = b"r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"

SEEDS = [
    b'CreateQueue\n{"QueueName": "other", "Attributes": {"VisibilityTimeout": "45"}, "tags": {"a": "b"}}',
    b'CreateQueue\n{"QueueName": "o.fifo", "Attributes": {"FifoQueue": "true"}}',
    b'ListQueues\n{"QueueNamePrefix": "o", "MaxResults": 1, "NextToken": "b3JkZXJz"}',
    b'GetQueueAttributes\n{"QueueUrl": "' + _URL + b'", "AttributeNames": ["All"]}',
    b'SetQueueAttributes\n{"QueueUrl": "'
    + _URL
    + b'", "Attributes": {"RedrivePolicy": "{\\"deadLetterTargetArn\\": \\"'
    + _ARN
    + b'\\", \\"maxReceiveCount\\": 3}"}}',
    b'SetQueueAttributes\n{"QueueUrl": "'
    + _URL
    + b'", "Attributes": {"RedriveAllowPolicy": "{\\"redrivePermission\\": \\"denyAll\\"}"}}',
    b'TagQueue\n{"QueueUrl": "' + _URL + b'", "Tags": {"a": "b"}}',
    b'SendMessage\n{"QueueUrl": "'
    + _URL
    + b'", "MessageBody": "x", "MessageAttributes": '
    + _ATTRIBUTE
    + b"}",
    b'SendMessageBatch\n{"QueueUrl": "' + _URL + b'", "Entries": [{"Id": "a", "MessageBody": "x"}]}',
    b'ReceiveMessage\n{"QueueUrl": "'
    + _URL
    + b'", "MaxNumberOfMessages": 10, "MessageAttributeNames": ["a.*"]}',
    b'DeleteMessage\n{"QueueUrl": "' + _URL + b'", "ReceiptHandle": "' + _RECEIPT + b'"}',
    b'ChangeMessageVisibilityBatch\n{"QueueUrl": "'
    + _URL
    + b'", "Entries": [{"Id": "a", "VisibilityTimeout": 0}]}',
    b'StartMessageMoveTask\n{"SourceArn": "' + _ARN + b'", "MaxNumberOfMessagesPerSecond": 1}',
    b'CancelMessageMoveTask\n{"TaskHandle": "eyJ0YXNrSWQiOiJ4In0="}',
    b'PurgeQueue\n{"QueueUrl": "' + _URL + b'"}',
    b"form\nAction=CreateQueue&QueueName=other&Attribute.1.Name=DelaySeconds&Attribute.1.Value=1&Tag.1.Key=a&Tag.1.Value=b",
    b"form\nAction=SendMessage&QueueUrl="
    + _URL
    + b"&MessageBody=x&MessageAttribute.1.Name=a&MessageAttribute.1.Value"
    b".DataType=Binary&MessageAttribute.1.Value.BinaryValue=eA%3D%3D&DelaySeconds=1",
    b"form\nAction=SendMessageBatch&QueueUrl="
    + _URL
    + b"&SendMessageBatchRequestEntry.1.Id=a&SendMessageBatchRequest"
    b"Entry.1.MessageBody=x&SendMessageBatchRequestEntry.1.MessageAttribute.1.Name=a",
    b"form\nAction=ReceiveMessage&QueueUrl=" + _URL + b"&AttributeName.1=All&MessageAttributeName.1=All",
    b"form\nAction=GetQueueAttributes&QueueUrl=" + _URL + b"&AttributeName.1=All",
    b"AWS4-HMAC-SHA256\nCredential=a/20260131/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature="
    + b"0" * 64,
]
BOMBS = [
    b"SendMessage\n" + b"[" * 500_000,
    b"SendMessage\n" + b'{"MessageAttributes":' * 100_000,
    b'SendMessage\n{"QueueUrl": "' + b"x" * 900_000 + b'", "MessageBody": "x"}',
    b'ReceiveMessage\n{"QueueUrl": "' + _URL + b'", "MaxNumberOfMessages": ' + b"9" * 900_000 + b"}",
    b"form\nAction=SendMessage&" + b"MessageAttribute." * 50_000 + b"=1",
    b"form\n" + b"a=b&" * 200_000,
    b"form\nAction=SendMessage&" + b"%41" * 300_000 + b"=1",
    b"AWS4-HMAC-SHA256\nCredential=" + b"a/" * 400_000,
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check, over a mailbox in memory that is replaced before it grows large."""
    with asyncio.Runner() as runner:
        calls = _Calls(runner)
        try:
            yield calls.check
        finally:
            calls.close()


class _Calls:
    """Requests to an application over a mailbox in memory that has the queue `orders`."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._count = 0
        self._opening: Any = None
        self._app: Any = None

    def check(self, data: bytes) -> None:
        """Check that a request is answered by anything but an internal error."""
        if self._count % INPUTS_PER_MAILBOX == 0:
            self.close()
            self._runner.run(self._open())
        self._count += 1
        line, _, body = data.partition(b"\n")
        if line == b"AWS4-HMAC-SHA256":
            _check_signature(body)
            return
        status, answer = self._runner.run(_call(self._app, line, body))
        assert status < 500, answer
        if line == b"form":
            ElementTree.fromstring(answer)
        else:
            json.loads(answer)

    async def _open(self) -> None:
        self._opening = open_mailbox("memory:", "acme@one")
        mailbox = await self._opening.__aenter__()
        self._app = SqsApp(stopping_service(mailbox), "http")
        await _call(self._app, b"CreateQueue", b'{"QueueName": "orders"}')

    def close(self) -> None:
        """Close the mailbox."""
        if self._opening is not None:
            self._runner.run(self._opening.__aexit__(None, None, None))
            self._opening = None


def _check_signature(value: bytes) -> None:
    headers = [
        ("authorization", f"AWS4-HMAC-SHA256 {value.decode('latin-1')}"),
        ("x-amz-date", "20260131T120000Z"),
    ]
    with suppress(SqsError):
        read_signature(Request("POST", "/", "", headers, b""), 0.0)


async def _call(app: SqsApp, line: bytes, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [] if line == b"form" else [(b"x-amz-target", b"AmazonSQS." + line)],
        "state": {"connection": Connection()},
    }
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]
