"""Clients of Amazon SQS use a mailbox: boto3, in both protocols."""

import hashlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.support.console import read_steps
from tests.support.servers.http import PostroomServer
from tests.support.sqs import (
    SQS,
    new_queue,
    receive,
    refused,
    sqs_client,
)

PAGE = Path(__file__).parents[3] / "docs" / "sqs.md"


def test_a_message_arrives_with_its_attributes_and_digests(client: Any, url: str) -> None:
    """boto3 itself compares the digests of body and attributes."""
    attributes = {
        "text": {"DataType": "String", "StringValue": "größer & <kleiner>"},
        "number": {"DataType": "Number.int", "StringValue": "-12.5e3"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
        "letters": {"DataType": "Binary.png", "BinaryValue": b"abc"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-2-3"}}
    body = 'line "1"\r\n\t<é> & 😀'
    sent = client.send_message(
        QueueUrl=url, MessageBody=body, MessageAttributes=attributes, MessageSystemAttributes=trace
    )
    assert sent["MD5OfMessageBody"] == hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
    (message,) = receive(client, url)
    assert message["Body"] == body
    assert message["MessageId"] == sent["MessageId"]
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    assert message["Attributes"]["AWSTraceHeader"] == "Root=1-2-3"
    assert len(message["Attributes"]["SentTimestamp"]) == len("1795897101880")
    client.change_message_visibility(
        QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
    )
    (again,) = receive(client, url)
    first, count = "ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount"
    assert again["Attributes"][count] == "2"
    assert abs(int(again["Attributes"][first]) - int(message["Attributes"][first])) < 1_000
    client.delete_message(QueueUrl=url, ReceiptHandle=again["ReceiptHandle"])
    client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert receive(client, url) == []


def test_attributes_are_asked_for_by_name_and_prefix(client: Any, url: str) -> None:
    """Without names there are none."""
    value = {"DataType": "String", "StringValue": "x"}
    names = ("app.one", "app.two", "other")
    client.send_message(QueueUrl=url, MessageBody="x", MessageAttributes=dict.fromkeys(names, value))
    asked: list[tuple[list[str], set[str]]] = [([], set()), (["other"], {"other"}), (["app.*"], {*names[:2]})]
    for wanted, expected in asked:
        answer = client.receive_message(QueueUrl=url, MessageAttributeNames=wanted, VisibilityTimeout=0)
        (message,) = answer["Messages"]
        assert set(message.get("MessageAttributes", {})) == expected
        assert "Attributes" not in message
        client.change_message_visibility(
            QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
        )


def test_batches_have_an_outcome_for_each_entry(client: Any, url: str) -> None:
    """Invalid entries are refused alone."""
    entries: list[dict[str, Any]] = [{"Id": f"e{i}", "MessageBody": f"m{i}"} for i in range(9)]
    answer = client.send_message_batch(
        QueueUrl=url, Entries=[*entries, {"Id": "bad", "MessageBody": "x", "DelaySeconds": 901}]
    )
    assert [each["Id"] for each in answer["Successful"]] == [each["Id"] for each in entries]
    (failure,) = answer["Failed"]
    assert (failure["Id"], failure["SenderFault"], failure["Code"]) == ("bad", True, "InvalidParameterValue")
    messages = receive(client, url)
    assert [each["Body"] for each in messages] == [f"m{i}" for i in range(9)]
    handles = [each["ReceiptHandle"] for each in messages]
    hidden = [{"Id": "a", "ReceiptHandle": handles[0], "VisibilityTimeout": 0}]
    hidden.append({"Id": "b", "ReceiptHandle": "nonsense", "VisibilityTimeout": 0})
    changed = client.change_message_visibility_batch(QueueUrl=url, Entries=hidden)
    assert [each["Id"] for each in changed["Successful"]] == ["a"]
    assert [each["Code"] for each in changed["Failed"]] == ["ReceiptHandleIsInvalid"]
    deleted = [{"Id": f"d{i}", "ReceiptHandle": each} for i, each in enumerate([*handles[1:], "nonsense"])]
    answer = client.delete_message_batch(QueueUrl=url, Entries=deleted)
    assert len(answer["Successful"]) == 8
    assert [each["Code"] for each in answer["Failed"]] == ["ReceiptHandleIsInvalid"]
    assert [each["Body"] for each in receive(client, url)] == ["m0"]


def test_queues_are_created_listed_tagged_and_deleted(client: Any) -> None:
    """A queue has the attributes and tags that were given, and the defaults of SQS."""
    prefix = f"p{uuid4().hex}"
    names = [f"{prefix}-{i}" for i in range(3)]
    urls = [
        client.create_queue(
            QueueName=name, Attributes={"VisibilityTimeout": "45", "DelaySeconds": "0"}, tags={"team": "a b"}
        )["QueueUrl"]
        for name in names
    ]
    assert client.get_queue_url(QueueName=names[0])["QueueUrl"] == urls[0]
    page = client.list_queues(QueueNamePrefix=prefix, MaxResults=2)
    rest = client.list_queues(QueueNamePrefix=prefix, MaxResults=2, NextToken=page["NextToken"])
    assert page["QueueUrls"] + rest["QueueUrls"] == urls
    assert "NextToken" not in rest
    client.set_queue_attributes(
        QueueUrl=urls[0],
        Attributes={
            "VisibilityTimeout": "43200",
            "MessageRetentionPeriod": "60",
            "ReceiveMessageWaitTimeSeconds": "0",
            "MaximumMessageSize": "2048",
        },
    )
    values = client.get_queue_attributes(QueueUrl=urls[0], AttributeNames=["All"])["Attributes"]
    assert values["QueueArn"].endswith(f":{names[0]}")
    assert [
        values[each] for each in ("VisibilityTimeout", "MessageRetentionPeriod", "MaximumMessageSize")
    ] == [
        "43200",
        "60",
        "2048",
    ]
    assert values["ApproximateNumberOfMessages"] == "0"
    client.tag_queue(QueueUrl=urls[0], Tags={"cost": "7", "team": "b"})
    client.untag_queue(QueueUrl=urls[0], TagKeys=["cost", "unknown"])
    assert client.list_queue_tags(QueueUrl=urls[0])["Tags"] == {"team": "b"}
    assert (
        client.create_queue(QueueName=names[1], Attributes={"VisibilityTimeout": "45"})["QueueUrl"] == urls[1]
    )
    assert refused(client.create_queue, QueueName=names[1], Attributes={"VisibilityTimeout": "46"}) == (
        "QueueAlreadyExists",
        400,
    )
    for each in urls:
        client.send_message(QueueUrl=each, MessageBody="x", DelaySeconds=900)
        client.delete_queue(QueueUrl=each)
    assert client.list_queues(QueueNamePrefix=prefix).get("QueueUrls", []) == []
    again = client.create_queue(QueueName=names[0])["QueueUrl"]
    counts = client.get_queue_attributes(QueueUrl=again, AttributeNames=["All"])["Attributes"]
    assert [int(counts[each]) for each in sorted(counts) if each.startswith("Approx")] == [0, 0, 0]
    assert counts["VisibilityTimeout"] == "30"


def test_a_purge_removes_also_what_is_in_flight_and_delayed(client: Any, url: str) -> None:
    """The receipt of a removed message deletes nothing, which is no error."""
    client.send_message(QueueUrl=url, MessageBody="in flight")
    (message,) = receive(client, url)
    client.send_message(QueueUrl=url, MessageBody="ready")
    client.send_message(QueueUrl=url, MessageBody="delayed", DelaySeconds=900)
    client.purge_queue(QueueUrl=url)
    counts = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert [int(counts[each]) for each in sorted(counts) if each.startswith("Approx")] == [0, 0, 0]
    client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])


def test_a_long_poll_returns_as_soon_as_a_message_is_sent(client: Any, url: str) -> None:
    """The wait may also be an attribute of the queue."""
    client.set_queue_attributes(QueueUrl=url, Attributes={"ReceiveMessageWaitTimeSeconds": "20"})
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receive, client, url)
        client.send_message(QueueUrl=url, MessageBody="now", DelaySeconds=1)
        assert [each["Body"] for each in waiting.result(timeout=15)] == ["now"]


def test_a_fifo_queue_keeps_the_order_of_groups_and_recognises_repetitions(client: Any) -> None:
    """Another group is delivered while one has messages in flight."""
    url = new_queue(client, ".fifo", VisibilityTimeout="600")
    send = [("a", "1", "x"), ("a", "2", "y"), ("a", "1", "x"), ("a", "1", "another"), ("b", "3", "z")]
    sent = [
        client.send_message(QueueUrl=url, MessageGroupId=group, MessageDeduplicationId=id_, MessageBody=body)
        for group, id_, body in send
    ]
    assert sent[0]["MessageId"] == sent[2]["MessageId"]
    (first,) = receive(client, url, 1)
    assert first["Attributes"]["MessageDeduplicationId"] == "1"
    assert first["Attributes"]["SequenceNumber"] == sent[0]["SequenceNumber"]
    assert [(each["Body"], each["Attributes"]["MessageGroupId"]) for each in receive(client, url)] == [
        ("z", "b")
    ]
    client.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])
    assert [each["Body"] for each in receive(client, url)] == ["y"]
    code = ("InvalidParameterValue", 400)
    assert refused(client.send_message, QueueUrl=url, MessageBody="x", MessageGroupId="a") == code
    assert refused(client.send_message, QueueUrl=url, MessageBody="x") == ("MissingParameter", 400)
    values = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert (values["FifoQueue"], values["VisibilityTimeout"]) == ("true", "600")
    client.set_queue_attributes(
        QueueUrl=url, Attributes={"ContentBasedDeduplication": "true", "DeduplicationScope": "messageGroup"}
    )
    for group in ("c", "c", "d"):
        client.send_message(QueueUrl=url, MessageBody="same", MessageGroupId=group)
    ids = [each["Attributes"]["MessageDeduplicationId"] for each in receive(client, url)]
    assert ids == [hashlib.sha256(b"same").hexdigest()] * 2


def test_groups_of_a_standard_queue_take_turns(client: Any, url: str) -> None:
    """A group with many messages does not make another one wait."""
    for group in ("loud", "loud", "loud", "quiet"):
        client.send_message(QueueUrl=url, MessageBody=group, MessageGroupId=group)
    received = receive(client, url)
    assert [each["Body"] for each in received] == ["loud", "quiet", "loud", "loud"]
    assert received[1]["Attributes"]["MessageGroupId"] == "quiet"


def test_other_clients_of_the_mailbox_see_messages_and_send_them(
    server: PostroomServer, clients: dict[str, Any]
) -> None:
    """Message attributes are headers, and headers are message attributes."""
    client = clients["json"]
    url = new_queue(client)
    topic = url.rpartition("/")[2]
    client.send_message(
        QueueUrl=url,
        MessageBody="from SQS",
        MessageAttributes={"region": {"DataType": "String", "StringValue": "eu"}},
    )
    received = server.call("POST", "/v1/recv", {"topic": topic}).json["messages"]
    assert [each["attrs"] for each in received] == [{"region": "eu"}]
    sent = {"topic": topic, "payload_b64": "/w==", "idem_key": "1", "attrs": {"region": "us"}}
    server.call("POST", "/v1/send", sent)
    (message,) = receive(client, url)
    assert message["Body"] == "/w=="
    assert message["MessageAttributes"]["region"]["StringValue"] == "us"
    assert (
        server.call("POST", f"/v1/ack/{message['MessageId']}", {"receipt": message["ReceiptHandle"]}).status
        == 200
    )


def test_the_program_of_the_page_prints_what_the_page_shows(server: PostroomServer, tmp_path: Path) -> None:
    """Its server is another one."""
    page = PAGE.read_text("utf-8")
    (program,) = re.findall(r"^```python\n# orders.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "orders.py").write_text(program.replace("http://127.0.0.1:9324", server.addresses[1]))
    (step,) = [each for each in read_steps(page) if each.command == "python orders.py"]
    done = subprocess.run(
        [sys.executable, tmp_path / "orders.py"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == (step.output, "")


def test_queues_outlast_a_kill_and_are_the_same_for_two_servers(tmp_path: Path) -> None:
    """What the first server said is what the second one says, whose long polls outlast the first one."""
    options: dict[str, Any] = {"store": str(tmp_path / "store.db"), "sqs": SQS, "console": False}
    servers = [PostroomServer(tmp_path / name, **options) for name in ("one", "two")]
    with servers[0], servers[1], ThreadPoolExecutor() as pool:
        first, second = (sqs_client(each.addresses[1]) for each in servers)
        url = first.create_queue(QueueName="orders", Attributes={"DelaySeconds": "0"}, tags={"a": "b"})[
            "QueueUrl"
        ]
        fifo = new_queue(second, ".fifo", ContentBasedDeduplication="true")
        for number in range(10):
            (first, second)[number % 2].send_message(QueueUrl=url, MessageBody=str(number))
        second.send_message(QueueUrl=fifo, MessageBody="once", MessageGroupId="g")
        ordered = new_queue(first, ".fifo", ContentBasedDeduplication="true")
        numbers = [
            (first, second)[i % 2].send_message(QueueUrl=ordered, MessageBody=str(i), MessageGroupId="g")[
                "SequenceNumber"
            ]
            for i in range(10)
        ]
        assert numbers == sorted(set(numbers), key=int) == sorted(numbers)
        assert numbers == [each["Attributes"]["SequenceNumber"] for each in receive(first, ordered)]
        held = receive(first, url, 3, VisibilityTimeout=600)
        before = [
            first.get_queue_attributes(QueueUrl=each, AttributeNames=["All"])["Attributes"]
            for each in (url, fifo)
        ]
        polled = new_queue(second)
        waiting = pool.submit(receive, second, polled, WaitTimeSeconds=20)
        servers[0].process.kill()
        after = [
            second.get_queue_attributes(QueueUrl=each, AttributeNames=["All"])["Attributes"]
            for each in (url, fifo)
        ]
        assert after == before
        second.send_message(QueueUrl=polled, MessageBody="after the kill")
        assert [each["Body"] for each in waiting.result(timeout=30)] == ["after the kill"]
        assert second.list_queue_tags(QueueUrl=url)["Tags"] == {"a": "b"}
        second.send_message(QueueUrl=fifo, MessageBody="once", MessageGroupId="g")
        assert [each["Body"] for each in receive(second, fifo)] == ["once"]
        for each in held:
            second.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
        assert [each["Body"] for each in receive(second, url)] == [str(number) for number in range(3, 10)]
