"""Each error that SQS documents, in both protocols, as docs/sqs.md lists them."""

import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from postroom.adapters.sqs.errors import SqsError
from tests.support.servers.http import PostroomServer
from tests.support.sqs import receive, refused

PAGE = Path(__file__).parents[3] / "docs" / "sqs.md"
ARN = "arn:aws:sqs:us-east-1:000000000000:"
Case = tuple[Callable[..., Any], dict[str, Any]]


def documented() -> dict[str, str]:
    """Return when each error is answered, as the page says."""
    text = PAGE.read_text("utf-8").partition("| error | answered |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {name: row[1].strip() for row in rows for name in re.findall("`([^`]+)`", row[0])}


@pytest.fixture
def cases(client: Any, url: str) -> dict[str, list[Case]]:
    """Calls by the errors with which they are refused."""
    two = [{"Id": "a", "MessageBody": "x"}, {"Id": "a", "MessageBody": "x"}]
    many = [{"Id": f"e{i}", "MessageBody": "x"} for i in range(11)]
    large = [{"Id": f"e{i}", "MessageBody": "x" * 600_000} for i in range(2)]
    ids: dict[Any, dict[str, Any]] = {
        client.send_message_batch: {"MessageBody": "x"},
        client.delete_message_batch: {"ReceiptHandle": "x"},
        client.change_message_visibility_batch: {"ReceiptHandle": "x", "VisibilityTimeout": 0},
    }
    client.send_message(QueueUrl=url, MessageBody="x")
    (message,) = receive(client, url)
    handle = message["ReceiptHandle"]
    client.delete_message(QueueUrl=url, ReceiptHandle=handle)
    visibility, set_, create = (
        client.change_message_visibility,
        client.set_queue_attributes,
        client.create_queue,
    )
    name, task = url.rpartition("/")[2], client.start_message_move_task
    permission = {"Label": "x", "AWSAccountIds": ["1"], "Actions": ["*"]}

    def batches(entry: dict[str, Any], times: int) -> list[Case]:
        return [
            (call, {"QueueUrl": url, "Entries": [{**fields, **entry}] * times})
            for call, fields in ids.items()
        ]

    return {
        "QueueDoesNotExist": [
            (client.send_message, {"QueueUrl": url + "-missing", "MessageBody": "x"}),
            (client.get_queue_url, {"QueueName": "missing"}),
        ],
        "QueueNameExists": [(create, {"QueueName": name, "Attributes": {"DelaySeconds": "7"}})],
        "InvalidAddress": [(client.send_message, {"QueueUrl": "http://[x", "MessageBody": "x"})],
        "InvalidAttributeName": [
            (client.get_queue_attributes, {"QueueUrl": url, "AttributeNames": ["No"]}),
            (set_, {"QueueUrl": url, "Attributes": {"No": "1"}}),
            (create, {"QueueName": f"q{uuid4().hex}", "Attributes": {"No": "1"}}),
        ],
        "InvalidAttributeValue": [
            (set_, {"QueueUrl": url, "Attributes": {"DelaySeconds": "901"}}),
            (create, {"QueueName": f"{uuid4().hex}.fifo"}),
        ],
        "InvalidMessageContents": [(client.send_message, {"QueueUrl": url, "MessageBody": "\x01"})],
        "ReceiptHandleIsInvalid": [
            (client.delete_message, {"QueueUrl": url, "ReceiptHandle": "x"}),
            (visibility, {"QueueUrl": url, "ReceiptHandle": "x", "VisibilityTimeout": 1}),
        ],
        "MessageNotInflight": [
            (visibility, {"QueueUrl": url, "ReceiptHandle": handle, "VisibilityTimeout": 1})
        ],
        "EmptyBatchRequest": [(call, {"QueueUrl": url, "Entries": []}) for call in ids],
        "TooManyEntriesInBatchRequest": [
            (client.send_message_batch, {"QueueUrl": url, "Entries": many}),
            *batches({"Id": "x"}, 11)[1:],
        ],
        "BatchEntryIdsNotDistinct": [
            (client.send_message_batch, {"QueueUrl": url, "Entries": two}),
            *batches({"Id": "x"}, 2),
        ],
        "InvalidBatchEntryId": batches({"Id": "ä"}, 1),
        "BatchRequestTooLong": [(client.send_message_batch, {"QueueUrl": url, "Entries": large})],
        "ResourceNotFoundException": [
            (task, {"SourceArn": ARN + "missing"}),
            (client.list_message_move_tasks, {"SourceArn": ARN + "missing"}),
            (client.cancel_message_move_task, {"TaskHandle": handle_of(str(uuid4()))}),
        ],
        "UnsupportedOperation": [
            (set_, {"QueueUrl": url, "Attributes": {"KmsMasterKeyId": "x"}}),
            (client.add_permission, {"QueueUrl": url, **permission}),
            (client.remove_permission, {"QueueUrl": url, "Label": "x"}),
        ],
        "InvalidParameterValueException": [
            (client.send_message, {"QueueUrl": url, "MessageBody": "x" * ((1 << 20) + 1)}),
            (client.send_message, {"QueueUrl": url, "MessageBody": "x", "DelaySeconds": 901}),
            (client.receive_message, {"QueueUrl": url, "MaxNumberOfMessages": 11}),
            (client.receive_message, {"QueueUrl": url, "WaitTimeSeconds": 21}),
            (create, {"QueueName": "a b"}),
            (task, {"SourceArn": ARN + name}),
            *((client.cancel_message_move_task, {"TaskHandle": handle_of(id_)}) for id_ in ("x", 1, None)),
        ],
    }


def test_each_error_has_the_documented_code(cases: dict[str, list[Case]]) -> None:
    """Both protocols have the same codes; boto3 shows the names of the query protocol."""
    for name, calls in cases.items():
        for call, arguments in calls:
            status = 404 if name == "ResourceNotFoundException" else 400
            assert refused(call, **arguments) == (SqsError(name, "").code, status), (name, arguments)


def test_limits_have_errors_of_their_own(server: PostroomServer, client: Any, url: str) -> None:
    """OverLimit is of messages in flight, and RequestThrottled of a queue that is full."""
    change(server, {"topics": {url.rpartition("/")[2]: {"shard_capacity": 2}}})
    for body in ("first", "second"):
        client.send_message(QueueUrl=url, MessageBody=body)
    full = {"QueueUrl": url, "MessageBody": "x"}
    assert refused(client.send_message, **full) == ("RequestThrottled", 403)
    assert len(receive(client, url, 1)) == 1
    change(server, {"limits": {"in_flight_ceiling": 1}})
    try:
        assert refused(client.receive_message, QueueUrl=url) == ("OverLimit", 403)
    finally:
        change(server, {"limits": {"in_flight_ceiling": 8_192}})


def test_the_page_lists_the_errors_of_each_action(client: Any, cases: dict[str, list[Case]]) -> None:
    """boto3's model lists the errors that SQS documents; a test answers each that Postroom has."""
    model = client.meta.service_model
    shapes = {
        error.name for name in model.operation_names for error in model.operation_model(name).error_shapes
    }
    page = documented()
    assert page.keys() == shapes
    answered = {name for name, text in page.items() if not text.startswith("never")}
    assert answered == {*cases, "OverLimit", "RequestThrottled"} - {"InvalidParameterValueException"}


def handle_of(task: Any) -> str:
    """Return the handle of a move task."""
    return urlsafe_b64encode(json.dumps({"taskId": task}).encode()).decode()


def change(server: PostroomServer, changes: dict[str, Any]) -> None:
    """Change settings of the mailbox."""
    answer = server.call("PUT", "/v1/settings", {"changes": json.loads(json.dumps(changes))})
    assert answer.status == 200, answer.text
