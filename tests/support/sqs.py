"""Clients of SQS: boto3 as it is, and with the query protocol, which its earlier versions spoke."""

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.fork_server import shared_server
from tests.support.servers.http import PostroomServer

PROTOCOLS = ("json", "query")
SQS = "127.0.0.1:0"
"""Address of the server, at any free port."""
_MEMBERS = {
    "AttributeNameList": "AttributeName",
    "MessageAttributeNameList": "MessageAttributeName",
    "MessageSystemAttributeList": "MessageSystemAttributeName",
    "TagKeyList": "TagKey",
    "QueueUrlList": "QueueUrl",
    "MessageList": "Message",
    "BatchResultErrorEntryList": "BatchResultErrorEntry",
    "ListMessageMoveTasksResultEntryList": "ListMessageMoveTasksResultEntry",
    **{
        f"{action}Batch{kind}EntryList": f"{action}Batch{kind}Entry"
        for action in ("SendMessage", "DeleteMessage", "ChangeMessageVisibility")
        for kind in ("Request", "Result")
    },
}
_MAPS = {
    "QueueAttributeMap": ("Attribute", "Name", "Value"),
    "MessageSystemAttributeMap": ("Attribute", "Name", "Value"),
    "MessageBodyAttributeMap": ("MessageAttribute", "Name", "Value"),
    "MessageBodySystemAttributeMap": ("MessageSystemAttribute", "Name", "Value"),
    "TagMap": ("Tag", "Key", "Value"),
}


def sqs_client(url: str, protocol: str = "json", key: str = "any", secret: str = "any") -> Any:
    """Return a client that speaks a protocol with a server, and does not retry.

    Arguments:
        key, secret: its access key.
    """
    return _session(protocol).client(
        "sqs",
        endpoint_url=url,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}),
    )


@cache
def _session(protocol: str) -> boto3.Session:
    """Return a session, which reads the description of SQS once."""
    core = botocore.session.get_session()
    if protocol == "query":
        loader = core.get_component("data_loader")
        load = loader.load_service_model

        def load_service_model(service: str, kind: str, **options: Any) -> Any:
            model = load(service, kind, **options)
            return _as_query(model) if (service, kind) == ("sqs", "service-2") else model

        loader.load_service_model = load_service_model
    return boto3.Session(region_name="us-east-1", botocore_session=core)


def _as_query(model: Any) -> Any:
    """Give the description of SQS the protocol and the element names that it had in earlier versions."""
    metadata = {**model["metadata"], "protocol": "query", "protocols": ["query"]}
    metadata["xmlNamespace"] = "http://queue.amazonaws.com/doc/2012-11-05/"
    metadata.pop("awsQueryCompatible", None)
    shapes = dict(model["shapes"])
    for name, member in _MEMBERS.items():
        if name in shapes:
            shapes[name] = {
                **shapes[name],
                "flattened": True,
                "member": {**shapes[name]["member"], "locationName": member},
            }
    for name, (_, key, value) in _MAPS.items():
        shapes[name] = {
            **shapes[name],
            "flattened": True,
            "key": {**shapes[name]["key"], "locationName": key},
            "value": {**shapes[name]["value"], "locationName": value},
        }
    for name, shape in shapes.items():
        if shape["type"] == "structure":
            members = {
                each: {**member, "locationName": _MAPS[member["shape"]][0]}
                if member["shape"] in _MAPS
                else member
                for each, member in shape["members"].items()
            }
            shapes[name] = {**shape, "members": members}
    operations = {
        name: {**each, "output": {**each["output"], "resultWrapper": f"{name}Result"}}
        if "output" in each
        else each
        for name, each in model["operations"].items()
    }
    return {**model, "metadata": metadata, "shapes": shapes, "operations": operations}


def new_queue(client: Any, suffix: str = "", prefix: str = "q", **attributes: str) -> str:
    """Create a queue, and return its URL."""
    if suffix == ".fifo":
        attributes["FifoQueue"] = "true"
    name = f"{prefix}{uuid4().hex}{suffix}"
    return str(client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def receive(client: Any, url: str, most: int = 10, **options: Any) -> list[Any]:
    """Receive messages with all their attributes."""
    answer = client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=most,
        AttributeNames=["All"],
        MessageAttributeNames=["All"],
        **options,
    )
    return list(answer.get("Messages", []))


def refused(call: Any, **arguments: Any) -> tuple[str, int]:
    """Return the code and the status with which a call is refused."""
    with pytest.raises(ClientError) as refusal:
        call(**arguments)
    response: Any = refusal.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def is_refused(call: Any, **arguments: Any) -> bool:
    """Return whether a call is refused."""
    try:
        call(**arguments)
    except ClientError:
        return True
    return False


def raw(server: PostroomServer, body: bytes, headers: dict[str, str], path: str = "/") -> tuple[int, str]:
    """Make a request by hand, and return its status and its answer."""
    connection = server.connect()
    connection.port = int(server.addresses[1].rpartition(":")[2])
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def set_labels(server: PostroomServer, name: str, labels: dict[str, str]) -> None:
    """Set labels of a topic, as others may."""
    answer = server.call("PUT", "/v1/settings", {"changes": {"labels": {name: labels}}})
    assert answer.status == 200, answer.text


def token(folder: Path, *arguments: str) -> str:
    """Run a command on tokens of the store in a folder, and return what it prints."""
    script = Path(sys.executable).with_name("postroom")
    command = [str(script), "token", *arguments, "--store", str(folder / "store.db")]
    done = shared_server().run(command, folder, os.environ, b"", 60)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.decode())


def access_key(folder: Path, *arguments: str) -> tuple[str, str]:
    """Return a new access key: its id, and its secret."""
    printed = token(folder, "mint", "shop", "--access-key", *arguments)
    key, secret = re.findall(r"= (\S+)", printed)
    return key, secret
