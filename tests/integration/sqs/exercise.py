"""Every action of Amazon SQS, by any client, and its outcome."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.waiting import wait_until

Invoke = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Calls an action; raises Refused."""


class Refused(Exception):
    """The client reports an error of the server.

    Arguments:
        code: its name, as the client has it.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Exercise:
    """A run of all actions on queues of its own.

    Arguments:
        name: prefix of the names of the queues.
    """

    def __init__(self, invoke: Invoke, name: str) -> None:
        self._invoke = invoke
        self._name = name
        self.outcomes: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Return `yes` or `refused` for each action; raises AssertionError for a wrong answer."""
        url = self._queues()
        self._messages(url)
        self._order()
        self._dead_letters()
        self._do("PurgeQueue", QueueUrl=url)
        self._do("DeleteQueue", QueueUrl=url)
        assert self._refuse("GetQueueUrl", QueueName=self._name) in (
            "AWS.SimpleQueueService.NonExistentQueue",
            "QueueDoesNotExist",
        )
        return self.outcomes

    def _do(self, action: str, **parameters: Any) -> dict[str, Any]:
        answer = self._invoke(action, parameters)
        self.outcomes[action] = "yes"
        return answer

    def _refuse(self, action: str, **parameters: Any) -> str:
        try:
            self._invoke(action, parameters)
        except Refused as error:
            return error.code
        raise AssertionError(f"{action} was not refused")

    def _queues(self) -> str:
        name = self._name
        url = str(
            self._do(
                "CreateQueue", QueueName=name, Attributes={"VisibilityTimeout": "60"}, tags={"team": "a b"}
            )["QueueUrl"]
        )
        assert self._do("GetQueueUrl", QueueName=name)["QueueUrl"] == url
        assert self._do("ListQueues", QueueNamePrefix=name)["QueueUrls"] == [url]
        self._do("SetQueueAttributes", QueueUrl=url, Attributes={"VisibilityTimeout": "90"})
        values = self._do("GetQueueAttributes", QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert (values["VisibilityTimeout"], values["QueueArn"].rpartition(":")[2]) == ("90", name)
        self._do("TagQueue", QueueUrl=url, Tags={"cost": "größer & <7>"})
        assert self._do("ListQueueTags", QueueUrl=url)["Tags"] == {"team": "a b", "cost": "größer & <7>"}
        self._do("UntagQueue", QueueUrl=url, TagKeys=["team"])
        assert self._do("ListQueueTags", QueueUrl=url)["Tags"] == {"cost": "größer & <7>"}
        permission = {"QueueUrl": url, "Label": "x", "AWSAccountIds": ["000000000000"], "Actions": ["*"]}
        for action, parameters in (
            ("AddPermission", permission),
            ("RemovePermission", {"QueueUrl": url, "Label": "x"}),
        ):
            assert self._refuse(action, **parameters).endswith("UnsupportedOperation")
            self.outcomes[action] = "refused"
        return url

    def _messages(self, url: str) -> None:
        attributes = {
            "text": {"DataType": "String", "StringValue": "größer & <7>"},
            "number": {"DataType": "Number.int", "StringValue": "7"},
        }
        body = 'line "1"\r\n\t<é> & 😀'
        sent = self._do("SendMessage", QueueUrl=url, MessageBody=body, MessageAttributes=attributes)
        entries = [{"Id": each, "MessageBody": each} for each in ("a", "b")]
        answer = self._do("SendMessageBatch", QueueUrl=url, Entries=entries)
        assert [each["Id"] for each in answer["Successful"]] == ["a", "b"]
        first, second, third = self._receive(url, WaitTimeSeconds=1)
        assert (first["Body"], second["Body"], third["Body"]) == (body, "a", "b")
        assert (first["MessageId"], first["MessageAttributes"]) == (sent["MessageId"], attributes)
        handles = [each["ReceiptHandle"] for each in (first, second, third)]
        self._do("ChangeMessageVisibility", QueueUrl=url, ReceiptHandle=handles[0], VisibilityTimeout=0)
        hidden = [{"Id": "x", "ReceiptHandle": handles[1], "VisibilityTimeout": 0}]
        self._do("ChangeMessageVisibilityBatch", QueueUrl=url, Entries=hidden)
        self._do("DeleteMessage", QueueUrl=url, ReceiptHandle=handles[2])
        again = self._receive(url)
        assert [each["Body"] for each in again] == [body, "a"]
        assert again[0]["Attributes"]["ApproximateReceiveCount"] == "2"
        deleted = [{"Id": f"d{i}", "ReceiptHandle": each["ReceiptHandle"]} for i, each in enumerate(again)]
        answer = self._do("DeleteMessageBatch", QueueUrl=url, Entries=deleted)
        assert [each["Id"] for each in answer["Successful"]] == ["d0", "d1"]
        assert not self._receive(url)

    def _order(self) -> None:
        attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
        url = self._do("CreateQueue", QueueName=self._name + ".fifo", Attributes=attributes)["QueueUrl"]
        numbers = [
            self._do("SendMessage", QueueUrl=url, MessageBody=each, MessageGroupId="g")["SequenceNumber"]
            for each in ("1", "2", "2")
        ]
        assert int(numbers[0]) < int(numbers[1]) == int(numbers[2])
        received = self._receive(url)
        assert [each["Body"] for each in received] == ["1", "2"]
        assert [each["Attributes"]["SequenceNumber"] for each in received] == numbers[:2]

    def _dead_letters(self) -> None:
        target = self._do("CreateQueue", QueueName=self._name + "-dead")["QueueUrl"]
        values = self._do("GetQueueAttributes", QueueUrl=target, AttributeNames=["QueueArn"])["Attributes"]
        arn = values["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
        source = self._do(
            "CreateQueue", QueueName=self._name + "-source", Attributes={"RedrivePolicy": policy}
        )["QueueUrl"]
        sources = self._do("ListDeadLetterSourceQueues", QueueUrl=target)
        assert sources["queueUrls"] == [source]
        entries = [{"Id": f"m{i}", "MessageBody": f"m{i}"} for i in range(10)]
        self._do("SendMessageBatch", QueueUrl=source, Entries=entries)
        hidden = [
            {"Id": f"x{i}", "ReceiptHandle": each["ReceiptHandle"], "VisibilityTimeout": 0}
            for i, each in enumerate(self._receive(source))
        ]
        self._do("ChangeMessageVisibilityBatch", QueueUrl=source, Entries=hidden)
        slow = self._do("StartMessageMoveTask", SourceArn=arn, MaxNumberOfMessagesPerSecond=1)
        self._do("CancelMessageMoveTask", TaskHandle=slow["TaskHandle"])
        self._do("StartMessageMoveTask", SourceArn=arn)

        def statuses() -> list[str]:
            tasks = self._do("ListMessageMoveTasks", SourceArn=arn, MaxResults=10)["Results"]
            return [each["Status"] for each in tasks]

        wait_until(lambda: statuses() == ["COMPLETED", "CANCELLED"])
        assert len(self._receive(source)) == 10

    def _receive(self, url: str, **options: Any) -> list[dict[str, Any]]:
        answer = self._do(
            "ReceiveMessage",
            QueueUrl=url,
            MaxNumberOfMessages=10,
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
            **options,
        )
        return list(answer.get("Messages") or [])
