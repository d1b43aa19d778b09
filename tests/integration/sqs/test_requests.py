"""Requests that are refused, with the codes of Amazon SQS."""

import json
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

from postroom.adapters.sqs.app import ACTIONS
from tests.support.servers.http import PostroomServer
from tests.support.sqs import (
    new_queue,
    raw,
    receive,
    refused,
    set_labels,
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "",
    "x",
    "\0",
    "é" * 5_000,
    [],
    ["x"],
    [1],
    {},
    {"x": "x"},
    {"x": {}},
    [{"Id": "x"}],
)


@pytest.mark.parametrize(
    ("target", "body", "error"),
    [
        (
            "SendMessage",
            b'{"QueueUrl": "x", "MessageBody": "x", "Unknown": 1}',
            "InvalidParameterValueException",
        ),
        ("SendMessage", b'{"QueueUrl": 1}', "SerializationException"),
        ("SendMessage", b"[]", "SerializationException"),
        ("SendMessage", b"{", "SerializationException"),
        ("SendMessage", b'{"MessageBody": "\\ud800"}', "SerializationException"),
        ("SendMessage", b'{"QueueUrl": "http://[x", "MessageBody": "x"}', "InvalidAddress"),
        ("SendMessage", b"{}", "MissingRequiredParameterException"),
        ("GetQueueUrl", b"{}", "MissingRequiredParameterException"),
        ("Explode", b"{}", "UnknownOperationException"),
    ],
)
def test_malformed_json_is_refused(server: PostroomServer, target: str, body: bytes, error: str) -> None:
    """Each answer is one of SQS."""
    headers = {"X-Amz-Target": f"AmazonSQS.{target}", "Content-Type": "application/x-amz-json-1.0"}
    status, answer = raw(server, body, headers)
    assert (status, json.loads(answer)["__type"]) == (400, f"com.amazonaws.sqs#{error}")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "MissingAction"),
        (b"Action=Explode", "InvalidAction"),
        (b"Action=SendMessage&Action=SendMessage", "InvalidQueryParameter"),
        (b"Action=SendMessage&Unknown=1", "InvalidParameterValue"),
        (b"Action=SendMessage&MessageBody", "MalformedQueryString"),
        (b"Action=SendMessage&MessageAttribute.x.Name=a", "InvalidQueryParameter"),
        (b"Action=SendMessage&MessageAttribute.1.Name=a", "MissingParameter"),
        (b"Action=ReceiveMessage&MaxNumberOfMessages=x", "SerializationException"),
        (b"Action=CreateQueue&Attribute=1", "InvalidParameterValue"),
        (
            b"Action=SendMessageBatch&" + b"SendMessageBatchRequestEntry.1." * 1_500 + b"Id=x",
            "InvalidQueryParameter",
        ),
        (b"Action=CreateQueue&QueueName=%00%EF%BF%BF", "InvalidParameterValue"),
    ],
)
def test_malformed_forms_are_refused(server: PostroomServer, body: bytes, code: str) -> None:
    """Each answer is one of SQS."""
    status, answer = raw(server, body, {"Content-Type": "application/x-www-form-urlencoded"})
    assert status == 400
    assert f"<Code>{code}</Code>" in answer
    ElementTree.fromstring(answer)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("RedrivePolicy", r'{"deadLetterTargetArn": "\ud800", "maxReceiveCount": 1}'),
        ("RedrivePolicy", f'{{"deadLetterTargetArn": "x", "maxReceiveCount": "{"9" * 5_000}"}}'),
        ("RedriveAllowPolicy", r'{"redrivePermission": "byQueue", "sourceQueueArns": ["\ud800"]}'),
    ],
)
def test_malformed_policies_are_refused(client: Any, url: str, attribute: str, value: str) -> None:
    """They are JSON in a text of their own."""
    code, status = refused(client.set_queue_attributes, QueueUrl=url, Attributes={attribute: value})
    assert (code.startswith("Invalid"), status) == (True, 400)


def test_labels_that_others_set_are_ignored_if_they_are_no_attributes(
    server: PostroomServer, client: Any
) -> None:
    """Each action on the queue answers as it would without them."""
    url = new_queue(client, DelaySeconds="0")
    name = url.rpartition("/")[2]
    before = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    names = ("DelaySeconds", "ReceiveMessageWaitTimeSeconds", "MaximumMessageSize", "VisibilityTimeout")
    others = ("ContentBasedDeduplication", "deadLetterQueue", "RedriveAllowPolicy", "created", "modified")
    for value in ("x", "", "-1", "9" * 30, "{", "\u0664"):
        set_labels(server, name, {f"$sqs.{each}": value for each in (*names, *others)})
        after = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        after.pop("RedrivePolicy", None)
        times = {"CreatedTimestamp", "LastModifiedTimestamp"}
        assert {each: after[each] for each in after if each not in times} == {
            each: before[each] for each in before if each not in times
        }
        assert all(after[each].isdecimal() for each in times)
        client.send_message(QueueUrl=url, MessageBody=value or "empty")
        (message,) = receive(client, url)
        client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        policy = json.dumps({"deadLetterTargetArn": before["QueueArn"], "maxReceiveCount": 1})
        assert refused(new_queue, client=client, RedrivePolicy=policy) == ("InvalidAttributeValue", 400)


def test_a_topic_with_any_name_is_a_queue_with_a_url_of_its_own(server: PostroomServer, client: Any) -> None:
    """Other clients may name topics as SQS does not name queues."""
    url = new_queue(client)
    inner = url.rpartition("/")[2]
    name = f"größe/{inner}#%2F&<x>"
    set_labels(server, name, {"tag": "value"})
    assert client.list_queue_tags(QueueUrl=url).get("Tags", {}) == {}
    other = client.get_queue_url(QueueName=name)["QueueUrl"]
    assert other in client.list_queues(QueueNamePrefix="größe/")["QueueUrls"]
    assert client.list_queue_tags(QueueUrl=other)["Tags"] == {"tag": "value"}
    client.delete_queue(QueueUrl=other)
    assert client.get_queue_url(QueueName=inner)["QueueUrl"] == url


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_no_value_of_a_parameter_is_a_defect(server: PostroomServer, action: str, clients: Any) -> None:
    """Each type in each parameter is accepted or refused."""
    headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
    url = new_queue(clients["json"])
    name = url.rpartition("/")[2]
    valid = {"QueueUrl": url, "QueueName": name, "SourceArn": f"arn:aws:sqs:us-east-1:000000000000:{name}"}
    names = ACTIONS[action].request.__struct_encode_fields__
    for field in names:
        for value in VALUES:
            body = {each: text for each, text in valid.items() if each in names} | {field: value}
            status, answer = raw(server, json.dumps(body).encode(), headers)
            assert status < 500, (body, answer)
            form = urlencode({"Action": action, field: str(value), f"{field}.1": "x", f"{field}.1.Name": "x"})
            assert raw(server, form.encode(), {})[0] < 500, form


def test_requests_are_bounded_and_not_of_web_pages(server: PostroomServer) -> None:
    """A browser names the page that sends a form."""
    assert raw(server, b"x" * (5 << 20), {})[0] == 413
    assert raw(server, b"Action=ListQueues", {"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert raw(server, b"Action=ListQueues", {"Host": "evil.example"})[0] == 421
