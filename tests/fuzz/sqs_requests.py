"""Target: requests of SQS clients: a line with the action, or `form` of the query protocol, and the body."""

import json
from contextlib import AsyncExitStack, suppress
from typing import Any
from xml.etree import ElementTree

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.sqs.app import SqsApp
from postroom.adapters.sqs.errors import SqsError
from postroom.adapters.sqs.signature import Request, read_signature
from tests.fuzz.services import MailboxCalls, call_app, stopping_service

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


class _Calls(MailboxCalls):
    """Requests to an application over a mailbox in memory that has the queue `orders`."""

    def call(self, data: bytes) -> None:
        """Check that a request is answered by anything but an internal error."""
        line, _, body = data.partition(b"\n")
        if line == b"AWS4-HMAC-SHA256":
            _check_signature(body)
            return
        status, answer = self._runner.run(call_app(self._app, _scope(line), body))
        assert status < 500, answer
        if line == b"form":
            ElementTree.fromstring(answer)
        else:
            json.loads(answer)

    async def serve(self, mailbox: OwnedMailbox, opened: AsyncExitStack) -> None:
        self._app = SqsApp(stopping_service(mailbox), "http")
        await call_app(self._app, _scope(b"CreateQueue"), b'{"QueueName": "orders"}')


def _check_signature(value: bytes) -> None:
    headers = [
        ("authorization", f"AWS4-HMAC-SHA256 {value.decode('latin-1')}"),
        ("x-amz-date", "20260131T120000Z"),
    ]
    with suppress(SqsError):
        read_signature(Request("POST", "/", "", headers, b""), 0.0)


def _scope(line: bytes) -> dict[str, Any]:
    return {
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [] if line == b"form" else [(b"x-amz-target", b"AmazonSQS." + line)],
    }


opened = _Calls.opened
