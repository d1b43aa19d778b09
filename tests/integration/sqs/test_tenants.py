"""Two tenants, whose access keys are for topics of their own, on one server."""

import json
from typing import Any, NamedTuple

import pytest

from tests.support.servers.http import PostroomServer
from tests.support.sqs import PROTOCOLS, access_key, new_queue, receive, refused, sqs_client
from tests.support.waiting import wait_until

ARN = "arn:aws:sqs:us-east-1:000000000000:"
DENIED = ("AccessDenied", 403)


class Tenants(NamedTuple):
    """Clients of an administrator and of two tenants."""

    admin: Any
    red: Any
    blue: Any

    def queue(self, prefix: str, **attributes: str) -> str:
        """Create a queue, and return its URL."""
        return new_queue(self.admin, prefix=prefix, **attributes)


@pytest.fixture(scope="module")
def keys(checked: PostroomServer) -> list[tuple[str, str]]:
    """Keys of an administrator and of two tenants, who may do anything to their topics."""
    limits: list[tuple[str, ...]] = [(), ("--topic", "red-*"), ("--topic", "blue-*")]
    return [access_key(checked.folder, "--operation", "all", *each) for each in limits]


@pytest.fixture(scope="module", params=PROTOCOLS)
def tenants(request: pytest.FixtureRequest, checked: PostroomServer, keys: list[tuple[str, str]]) -> Tenants:
    """Clients of one protocol."""
    return Tenants(*(sqs_client(checked.addresses[1], request.param, *each) for each in keys))


def arn_of(url: str) -> str:
    """Return the ARN of a queue."""
    return ARN + url.rpartition("/")[2]


def policy(url: str) -> str:
    """Return a redrive policy."""
    return json.dumps({"deadLetterTargetArn": arn_of(url), "maxReceiveCount": 1})


def fail(client: Any, url: str, count: int = 1) -> None:
    """Send messages, and make them and all others of the queue dead letters."""
    entries = [{"Id": str(i), "MessageBody": "failed"} for i in range(count)]
    client.send_message_batch(QueueUrl=url, Entries=entries)
    for message in wait_for(client, url, count):
        client.change_message_visibility(
            QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
        )


def test_no_action_on_a_queue_of_another_tenant_tells_whether_it_exists(tenants: Tenants) -> None:
    """Each is refused in the same words for a queue that exists and for one that does not."""
    _, red, blue = tenants
    url = tenants.queue("red-")
    tenants.admin.tag_queue(QueueUrl=url, Tags={"secret": "x"})
    entry: dict[str, Any] = {"Id": "x"}
    handle = {"ReceiptHandle": "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"}
    for each in (url, url + "-missing"):
        name, on = each.rpartition("/")[2], {"QueueUrl": each}
        calls: list[tuple[Any, dict[str, Any]]] = [
            (blue.get_queue_url, {"QueueName": name}),
            (blue.create_queue, {"QueueName": name}),
            (blue.get_queue_attributes, {**on, "AttributeNames": ["All"]}),
            (blue.set_queue_attributes, {**on, "Attributes": {"DelaySeconds": "1"}}),
            (blue.tag_queue, {**on, "Tags": {"a": "b"}}),
            (blue.untag_queue, {**on, "TagKeys": ["secret"]}),
            (blue.list_queue_tags, on),
            (blue.list_dead_letter_source_queues, on),
            (blue.purge_queue, on),
            (blue.delete_queue, on),
            (blue.send_message, {**on, "MessageBody": "x"}),
            (blue.send_message_batch, {**on, "Entries": [{**entry, "MessageBody": "x"}]}),
            (blue.receive_message, on),
            (blue.delete_message, {**on, **handle}),
            (blue.delete_message_batch, {**on, "Entries": [{**entry, **handle}]}),
            (blue.change_message_visibility, {**on, **handle, "VisibilityTimeout": 0}),
            (
                blue.change_message_visibility_batch,
                {**on, "Entries": [{**entry, **handle, "VisibilityTimeout": 0}]},
            ),
            (blue.start_message_move_task, {"SourceArn": arn_of(each)}),
            (blue.list_message_move_tasks, {"SourceArn": arn_of(each)}),
        ]
        for call, arguments in calls:
            assert refused(call, **arguments) == DENIED, arguments
    assert url not in blue.list_queues().get("QueueUrls", [])
    assert blue.list_queues(QueueNamePrefix="red-").get("QueueUrls", []) == []
    assert red.list_queue_tags(QueueUrl=url)["Tags"] == {"secret": "x"}


def test_receipts_and_tasks_of_another_tenant_are_of_no_use(tenants: Tenants) -> None:
    """Also if somebody knows them."""
    _, red, blue = tenants
    target, own = tenants.queue("red-"), tenants.queue("blue-")
    source = tenants.queue("red-", RedrivePolicy=policy(target))
    own_source = tenants.queue("blue-", RedrivePolicy=policy(own))
    red.send_message(QueueUrl=source, MessageBody="x")
    (message,) = receive(red, source)
    receipt = {"ReceiptHandle": message["ReceiptHandle"]}
    refused(blue.change_message_visibility, QueueUrl=own, **receipt, VisibilityTimeout=0)
    blue.delete_message_batch(QueueUrl=own, Entries=[{"Id": "x", **receipt}])
    red.change_message_visibility(QueueUrl=source, **receipt, VisibilityTimeout=0)
    fail(red, source, 10)
    fail(blue, own_source)
    slow = red.start_message_move_task(SourceArn=arn_of(target), MaxNumberOfMessagesPerSecond=1)
    assert refused(blue.cancel_message_move_task, TaskHandle=slow["TaskHandle"])[1] in (403, 404)
    elsewhere = {"SourceArn": arn_of(own), "DestinationArn": arn_of(target)}
    assert refused(blue.start_message_move_task, **elsewhere) == DENIED
    assert blue.list_message_move_tasks(SourceArn=arn_of(own)).get("Results", []) == []
    red.cancel_message_move_task(TaskHandle=slow["TaskHandle"])  # only active tasks can be


def test_a_dead_letter_queue_of_two_tenants_shows_each_its_own_sources(tenants: Tenants) -> None:
    """An administrator gave it to both; who may receive from it gets the messages of both."""
    admin, red, blue = tenants
    target = tenants.queue("red-")
    source, other = (tenants.queue(each, RedrivePolicy=policy(target)) for each in ("red-", "blue-"))
    assert red.list_dead_letter_source_queues(QueueUrl=target)["queueUrls"] == [source]
    assert refused(blue.list_dead_letter_source_queues, QueueUrl=target) == DENIED
    assert sorted(admin.list_dead_letter_source_queues(QueueUrl=target)["queueUrls"]) == sorted(
        [source, other]
    )
    fail(red, source)
    (own,) = receive(red, target, VisibilityTimeout=0)
    assert own["Attributes"]["DeadLetterQueueSourceArn"] == arn_of(source)
    fail(blue, other)
    assert refused(red.purge_queue, QueueUrl=target) == DENIED
    assert refused(red.start_message_move_task, SourceArn=arn_of(target)) == DENIED
    received = wait_for(red, target, 2)
    assert {each["Attributes"]["DeadLetterQueueSourceArn"] for each in received} == {
        arn_of(source),
        arn_of(other),
    }


def test_a_tenant_purges_its_queues_and_changes_none(tenants: Tenants) -> None:
    """The settings, which queues are part of, concern all topics."""
    _, red, _ = tenants
    url = tenants.queue("red-")
    assert refused(red.create_queue, QueueName="red-new") == DENIED
    assert refused(red.tag_queue, QueueUrl=url, Tags={"a": "b"}) == DENIED
    assert refused(red.set_queue_attributes, QueueUrl=url, Attributes={"DelaySeconds": "1"}) == DENIED
    red.send_message(QueueUrl=url, MessageBody="x")
    assert refused(red.delete_queue, QueueUrl=url) == DENIED
    assert len(receive(red, url)) == 1
    red.purge_queue(QueueUrl=url)
    counts = red.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert counts["ApproximateNumberOfMessagesNotVisible"] == "0"


def wait_for(client: Any, url: str, count: int) -> list[Any]:
    """Receive messages until there are as many."""
    received: list[Any] = []

    def has_all() -> bool:
        received.extend(receive(client, url))
        return len(received) >= count

    wait_until(has_all)
    return received
