"""Access keys stand for capabilities, and sign requests."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import time_machine
from botocore.exceptions import ClientError

from tests.support.servers.http import PostroomServer
from tests.support.sqs import (
    PROTOCOLS,
    access_key,
    is_refused,
    new_queue,
    raw,
    receive,
    refused,
    sqs_client,
    token,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_access_keys_stand_for_capabilities(checked: PostroomServer, protocol: str) -> None:
    """A key allows what its capability allows, as long as it is not revoked."""
    url = checked.addresses[1]
    key, secret = access_key(checked.folder, "--operation", "all")
    admin = sqs_client(url, protocol, key, secret)
    queue = admin.create_queue(QueueName=f"orders-{protocol}", tags={"a b/c": "ü"})["QueueUrl"]
    topic = queue.rpartition("/")[2]
    limits = ("--operation", "send", "--topic", topic, "--bind-principal")
    sender = sqs_client(url, protocol, *access_key(checked.folder, *limits))
    sender.send_message(QueueUrl=queue, MessageBody="größer &+ %20")
    assert refused(sender.receive_message, QueueUrl=queue)[1] == 403
    assert sender.get_queue_url(QueueName=topic)["QueueUrl"] == queue
    reading = ("--operation", "read-headers,send", "--topic", topic)
    reader = sqs_client(url, protocol, *access_key(checked.folder, *reading))
    other = new_queue(admin)
    for each in (other, queue + "-missing"):
        assert refused(reader.send_message, QueueUrl=each, MessageBody="x") == ("AccessDenied", 403)
        assert refused(reader.get_queue_attributes, QueueUrl=each) == ("AccessDenied", 403)
    arn = "arn:aws:sqs:us-east-1:000000000000:"
    limited = sqs_client(url, protocol, *access_key(checked.folder, "--operation", "all", "--topic", topic))
    for name in (other.rpartition("/")[2], "missing"):
        policy = json.dumps({"deadLetterTargetArn": arn + name, "maxReceiveCount": 1})
        with pytest.raises(ClientError, match=f"The access key is not for the queue {name}"):
            limited.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": policy})
    assert reader.list_queues()["QueueUrls"] == [queue]
    assert refused(sender.list_queue_tags, QueueUrl=queue)[1] == 403
    assert refused(reader.tag_queue, QueueUrl=queue, Tags={"a": "b"})[1] == 403
    assert refused(sender.purge_queue, QueueUrl=queue)[1] == 403
    (message,) = receive(admin, queue)
    assert (message["Body"], message["Attributes"]["SenderId"]) == ("größer &+ %20", "shop")
    for wrong in ((key, secret[:-2] + "xx"), (key[:-4] + "AAAA", secret), ("AKIAUNKNOWN", secret)):
        code, status = refused(sqs_client(url, protocol, *wrong).list_queues)
        assert status == 403
        assert code in ("SignatureDoesNotMatch", "InvalidClientTokenId")
    assert raw(checked, b"Action=ListQueues", {})[0] == 403
    token(checked.folder, "revoke", "--principal", "shop", "--yes")
    wait_until(lambda: is_refused(sender.send_message, QueueUrl=queue, MessageBody="x"))


def test_a_signature_is_of_its_request_and_time(checked: PostroomServer) -> None:
    """A request that was altered or recorded is refused."""
    key, secret = access_key(checked.folder, "--operation", "all")
    client = sqs_client(checked.addresses[1], "query", key, secret)
    sent: list[Any] = []
    client.meta.events.register("before-send.sqs", lambda request, **_: sent.append(request))
    client.list_queues()
    headers = {name: _text(value) for name, value in sent[0].headers.items()}
    body = sent[0].body if isinstance(sent[0].body, bytes) else str(sent[0].body).encode()
    assert raw(checked, body, headers)[0] == 200
    altered = body + b"&QueueNamePrefix=x"
    status, answer = raw(checked, altered, headers | {"Content-Length": str(len(altered))})
    assert (status, "SignatureDoesNotMatch" in answer) == (403, True)
    status, answer = raw(checked, body, headers | {"X-Amz-Target": "AmazonSQS.PurgeQueue"})
    assert (status, "IncompleteSignature" in answer) == (400, True)
    old = headers | {"X-Amz-Date": "20200101T000000Z"}
    assert raw(checked, body, old)[0] == 400
    status, answer = raw(checked, body, headers | {"Authorization": "Bearer x"})
    assert (status, "IncompleteSignature" in answer) == (400, True)


def test_clocks_of_clients_may_differ_by_15_minutes(checked: PostroomServer) -> None:
    """A request that was signed at another time is refused."""
    client = sqs_client(checked.addresses[1], "json", *access_key(checked.folder, "--operation", "all"))
    now = datetime.now(UTC)
    for minutes in (-14, 14):
        with time_machine.travel(now + timedelta(minutes=minutes)):
            assert client.list_queues()["ResponseMetadata"]["HTTPStatusCode"] == 200
    for minutes in (-16, 16):
        with time_machine.travel(now + timedelta(minutes=minutes)):
            assert refused(client.list_queues) == ("RequestExpired", 400)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
