"""Every action by every client, as docs/sqs.md says, and each documented error once."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError
from uv import find_uv_bin

from postroom.adapters.sqs.app import ACTIONS, UNSUPPORTED
from tests.integration.sqs.exercise import Exercise, Invoke, Refused
from tests.support.servers.http import PostroomServer

FOLDER = Path(__file__).parent
NODE = FOLDER / "node"
PAGE = FOLDER.parents[2] / "docs" / "sqs.md"
SECONDS = 120
Prepare = Callable[[Path], Sequence[str | Path]]


def documented(column: str) -> dict[str, str]:
    """Return the outcome of each action by a client, as the page says."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith(("| action by client |", "| `"))
    ]
    (head,) = [i for i, row in enumerate(rows) if row[0] == "action by client"]
    number = rows[head].index(column)
    table = [row for row in rows[head + 1 :] if len(row) == len(rows[head])]
    return {row[0].strip("`"): row[number] for row in table}


def test_each_action_gives_what_the_page_says(client: Any) -> None:
    """boto3 speaks the JSON protocol, and spoke the query protocol in earlier versions."""
    protocol = client.meta.service_model.metadata["protocol"]

    def invoke(action: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return dict(getattr(client, xform_name(action))(**parameters))
        except ClientError as error:
            response: Any = error.response
            raise Refused(response["Error"]["Code"]) from None

    column = "boto3, query" if protocol == "query" else "boto3"
    outcomes = Exercise(invoke, f"q{uuid4().hex}").run()
    assert outcomes == documented(column)
    assert outcomes.keys() == {*ACTIONS, *UNSUPPORTED} == {*client.meta.service_model.operation_names}


def environment(folder: Path, package: str) -> Path:
    """Return the programs of a new environment with a package, or skip the test."""
    uv = find_uv_bin()
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), package],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            pytest.skip(f"uv can't install {package}: {done.stderr.strip()[-300:]}")
    return folder / "bin"


def aiobotocore(folder: Path) -> Sequence[str | Path]:
    """Return the program that calls actions by aiobotocore."""
    return [environment(folder, "aiobotocore") / "python", FOLDER / "aiobotocore_client.py"]


def node(folder: Path) -> Sequence[str | Path]:
    """Return the program that calls actions by the packages from npm."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("Node and npm are not on the path")
    for name in ("package.json", "package-lock.json", "client.js"):
        shutil.copy(NODE / name, folder)
    install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"npm can't install the packages of the client: {done.stderr.strip()[-300:]}")
    return [program, folder / "client.js"]


@contextmanager
def conversation(command: Sequence[str | Path], url: str) -> Iterator[Invoke]:
    """Yield a function that calls an action by a program, which reads calls and prints answers."""
    process = subprocess.Popen(
        [*command, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def invoke(action: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        print(json.dumps({"action": action, "parameters": parameters}), file=stdin, flush=True)
        answer = json.loads(stdout.readline())
        if "code" in answer:
            raise Refused(answer["code"])
        return dict(answer["answer"])

    try:
        yield invoke
    finally:
        stdin.close()
        stdout.close()
        process.kill()
        process.wait(SECONDS)


@pytest.mark.extended
@pytest.mark.parametrize(("column", "prepare"), [("aiobotocore", aiobotocore), ("@aws-sdk/client-sqs", node)])
def test_each_action_by_other_sdks_gives_what_the_page_says(
    server: PostroomServer, tmp_path: Path, column: str, prepare: Prepare
) -> None:
    """The test installs each SDK, as its requirements conflict with boto3's."""
    with conversation(prepare(tmp_path), server.addresses[1]) as invoke:
        assert Exercise(invoke, f"q{uuid4().hex}").run() == documented(column)


@pytest.mark.extended
def test_each_action_by_the_aws_cli_gives_what_the_page_says(server: PostroomServer, tmp_path: Path) -> None:
    """Each call is a process."""
    aws = environment(tmp_path / "environment", "awscli") / "aws"
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8", **keys}

    def invoke(action: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [
                *(aws, "sqs", xform_name(action, "-"), "--endpoint-url", server.addresses[1]),
                *("--output", "json", "--cli-input-json", json.dumps(parameters)),
            ],
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            refusal = re.search(r"An error occurred \(([^)]+)\)", done.stderr)
            assert refusal is not None, done.stderr
            raise Refused(refusal[1])
        return dict(json.loads(done.stdout or "{}"))

    assert Exercise(invoke, f"q{uuid4().hex}").run() == documented("AWS CLI")


@pytest.mark.extended
def test_sqs_consumer_handles_each_message_and_a_failed_one_again(
    server: PostroomServer, tmp_path: Path
) -> None:
    """It is the consumer from npm."""
    with conversation(node(tmp_path), server.addresses[1]) as invoke:
        url = invoke("CreateQueue", {"QueueName": f"q{uuid4().hex}"})["QueueUrl"]
        bodies = [f"m{i}" for i in range(10)]
        entries = [{"Id": each, "MessageBody": each} for each in bodies]
        invoke("SendMessageBatch", {"QueueUrl": url, "Entries": entries})
        assert sorted(invoke("Consume", {"QueueUrl": url, "Count": 10})["Handled"]) == bodies
        name = "ApproximateNumberOfMessagesNotVisible"
        values = invoke("GetQueueAttributes", {"QueueUrl": url, "AttributeNames": [name]})
        assert values["Attributes"] == {name: "0"}
