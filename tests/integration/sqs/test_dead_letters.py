"""Dead-letter queues and move tasks of Amazon SQS."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.servers.http import PostroomServer
from tests.support.sqs import (
    new_queue,
    receive,
    refused,
    set_labels,
)
from tests.support.waiting import wait_until


def dead_letter_queue(client: Any, suffix: str = "", most: int = 1) -> tuple[str, str, str]:
    """Create a queue with a dead-letter queue, and return the URLs of both and the latter's ARN."""
    target = new_queue(client, suffix)
    arn = client.get_queue_attributes(QueueUrl=target, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": most})
    return new_queue(client, suffix, RedrivePolicy=policy), target, arn


def fail(client: Any, url: str) -> list[Any]:
    """Receive messages, and return them to their queue."""
    messages = receive(client, url)
    for each in messages:
        client.change_message_visibility(
            QueueUrl=url, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0
        )
    return messages


def count(client: Any, url: str) -> int:
    """Return the number of visible messages."""
    name = "ApproximateNumberOfMessages"
    return int(client.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])


def test_a_dead_letter_queue_delivers_what_failed_in_its_sources(client: Any) -> None:
    """Messages keep their ids, bodies and attributes, and are deleted as any other."""
    source, target, arn = dead_letter_queue(client, most=2)
    assert client.list_dead_letter_source_queues(QueueUrl=target)["queueUrls"] == [source]
    value = {"DataType": "Number", "StringValue": "1"}
    sent = client.send_message(QueueUrl=source, MessageBody="bad", MessageAttributes={"a": value})
    fail(client, source)
    assert receive(client, target) == []
    fail(client, source)
    assert receive(client, source) == []
    assert count(client, target) == 1
    (message,) = receive(client, target)
    assert (message["Body"], message["MessageId"]) == ("bad", sent["MessageId"])
    assert message["MessageAttributes"] == {"a": value}
    assert message["Attributes"]["DeadLetterQueueSourceArn"].endswith(source.rpartition("/")[2])
    assert receive(client, target) == []
    client.delete_message(QueueUrl=target, ReceiptHandle=message["ReceiptHandle"])
    assert count(client, target) == 0
    assert client.list_message_move_tasks(SourceArn=arn).get("Results", []) == []


def test_a_long_poll_of_a_dead_letter_queue_gets_what_fails_meanwhile(client: Any) -> None:
    """Nothing is copied before it is asked for."""
    source, target, _ = dead_letter_queue(client)
    client.send_message(QueueUrl=source, MessageBody="bad")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receive, client, target, WaitTimeSeconds=20)
        fail(client, source)
        assert [each["Body"] for each in waiting.result(timeout=15)] == ["bad"]


def test_move_tasks_return_messages_to_their_sources_or_to_another_queue(client: Any) -> None:
    """Also messages that were received from the dead-letter queue, and not deleted."""
    source, target, arn = dead_letter_queue(client)
    other = new_queue(client)
    for body in ("one", "two", "three"):
        client.send_message(QueueUrl=source, MessageBody=body)
    fail(client, source)
    (held,) = receive(client, target, 1)
    client.change_message_visibility(
        QueueUrl=target, ReceiptHandle=held["ReceiptHandle"], VisibilityTimeout=0
    )
    client.start_message_move_task(SourceArn=arn)
    wait_until(lambda: tasks(client, arn)[0]["Status"] == "COMPLETED")
    assert tasks(client, arn)[0]["ApproximateNumberOfMessagesMoved"] == 2
    assert (count(client, source), count(client, target)) == (3, 0)
    assert {each["Body"] for each in fail(client, source)} == {"one", "two", "three"}
    destination = {"DestinationArn": arn.rpartition(":")[0] + ":" + other.rpartition("/")[2]}
    slow = client.start_message_move_task(SourceArn=arn, MaxNumberOfMessagesPerSecond=1, **destination)
    assert refused(client.start_message_move_task, SourceArn=arn) == ("InvalidParameterValue", 400)
    client.cancel_message_move_task(TaskHandle=slow["TaskHandle"])
    assert tasks(client, arn)[0]["Status"] == "CANCELLED"
    cancel = client.cancel_message_move_task
    assert refused(cancel, TaskHandle=slow["TaskHandle"])[0].endswith("UnsupportedOperation")
    assert refused(client.start_message_move_task, SourceArn=arn + "x") == ("ResourceNotFoundException", 404)
    client.start_message_move_task(SourceArn=arn, **destination)
    wait_until(lambda: count(client, other) == 3)
    client.purge_queue(QueueUrl=target)
    assert count(client, target) == 0


@pytest.mark.parametrize("origin", ["x", "arn:aws:sqs:us-east-1:000000000000:{other}"])
def test_move_tasks_return_messages_to_sources_only(server: PostroomServer, client: Any, origin: str) -> None:
    """Any sender can set the header that names a source."""
    source, target, arn = dead_letter_queue(client)
    other = new_queue(client)
    attrs = {"$sqs.deadLetterQueueSource": origin.format(other=other.rpartition("/")[2])}
    sent = {"topic": target.rpartition("/")[2], "payload_b64": "eA==", "attrs": attrs}
    assert server.call("POST", "/v1/send", sent).status < 300
    client.send_message(QueueUrl=source, MessageBody="bad")
    fail(client, source)
    client.start_message_move_task(SourceArn=arn)
    wait_until(lambda: tasks(client, arn)[0]["Status"] == "COMPLETED")
    assert [count(client, each) for each in (source, target, other)] == [1, 1, 0]


def tasks(client: Any, arn: str) -> list[Any]:
    """Return the move tasks of a dead-letter queue, newest first."""
    return list(client.list_message_move_tasks(SourceArn=arn, MaxResults=10)["Results"])


def test_a_dead_letter_queue_keeps_messages_of_deleted_sources_and_permits_sources(
    client: Any,
) -> None:
    """A FIFO queue has a FIFO queue for its dead letters, whose groups stay."""
    source, target, arn = dead_letter_queue(client, ".fifo")
    client.send_message(QueueUrl=source, MessageBody="x", MessageGroupId="g", MessageDeduplicationId="1")
    fail(client, source)
    client.delete_queue(QueueUrl=source)
    (message,) = receive(client, target)
    assert message["Attributes"]["MessageGroupId"] == "g"
    assert message["Attributes"]["MessageDeduplicationId"] == "1"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 3})
    code = ("InvalidAttributeValue", 400)
    assert refused(new_queue, client=client, RedrivePolicy=policy) == code
    client.set_queue_attributes(
        QueueUrl=target, Attributes={"RedriveAllowPolicy": json.dumps({"redrivePermission": "denyAll"})}
    )
    assert refused(new_queue, client=client, suffix=".fifo", RedrivePolicy=policy) == code
    missing = json.dumps({"deadLetterTargetArn": arn + "x", "maxReceiveCount": 3})
    assert refused(new_queue, client=client, suffix=".fifo", RedrivePolicy=missing) == code


def test_a_queue_is_not_its_own_dead_letter_queue(server: PostroomServer, client: Any, url: str) -> None:
    """Its dead letters would be received again for ever; a label that says so is ignored."""
    name = url.rpartition("/")[2]
    arn = f"arn:aws:sqs:us-east-1:000000000000:{name}"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    assert refused(client.set_queue_attributes, QueueUrl=url, Attributes={"RedrivePolicy": policy}) == (
        "InvalidAttributeValue",
        400,
    )
    set_labels(server, name, {"$sqs.deadLetterQueue": name})
    assert client.list_dead_letter_source_queues(QueueUrl=url).get("queueUrls", []) == []
    assert refused(client.start_message_move_task, SourceArn=arn) == ("InvalidParameterValue", 400)


def test_a_move_task_moves_all_visible_messages(server: PostroomServer, client: Any) -> None:
    """It passes over the many messages that no source has sent."""
    source, target, arn = dead_letter_queue(client)
    origin = arn.rpartition(":")[0] + ":" + source.rpartition("/")[2]
    for count_, attrs in ((110, {}), (130, {"$sqs.deadLetterQueueSource": origin})):
        send_all(server, target, [{"attrs": attrs}] * count_)
    client.start_message_move_task(SourceArn=arn)
    assert (count(client, source), count(client, target)) == (130, 110)


def test_a_move_task_keeps_the_order_of_groups(server: PostroomServer, client: Any) -> None:
    """What follows a message that stays in its group stays, too."""
    source, target, arn = dead_letter_queue(client, ".fifo")
    attrs = {"$sqs.deadLetterQueueSource": arn.rpartition(":")[0] + ":" + source.rpartition("/")[2]}
    sent = [("a", attrs), ("b", {}), ("a", attrs), ("b", attrs), ("a", {}), ("a", attrs)]
    send_all(server, target, [{"sticky_key": group, "attrs": each} for group, each in sent])
    client.start_message_move_task(SourceArn=arn)
    assert (count(client, source), count(client, target)) == (2, 4)


def send_all(server: PostroomServer, url: str, messages: list[dict[str, Any]]) -> None:
    """Send messages by HTTP."""
    topic = url.rpartition("/")[2]
    body = [{"topic": topic, "payload_b64": "eA==", **each} for each in messages]
    assert "error" not in server.call("POST", "/v1/send", body).text
