"""Whatever an argument is, a command answers with a result or one line that says what is wrong with it."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroom import Worker
from postroom.adapters.cli import main

NEEDS_SERVERS = {"demo", "bench", "ingest", "outbox", "inbox", "streams", "rebuild", "follow", "roll-back"}
OPERANDS = {"topic": "orders", "receipts": "r.x", "message_id": "m", "file": "-", "format_": "json"}
ODD = ["", "0", "-1", "9" * 25, "9" * 12 + "d", "nan", "\udcff", "x" * 3_000, "0001-01-01", "[", "a=b", "-"]


worker = Worker()


@worker.consumer("orders")
def handle(message: bytes) -> None: ...


def parameters(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in set(command.list_commands(context)) - NEEDS_SERVERS:
            yield from parameters(command.get_command(context, name), *path, name)
    elif path != ("views", "verify"):
        for each in command.params:
            if not getattr(each, "is_flag", False) and each.name not in {"wait", "store", "config"}:
                yield path, command, each


EVERY_PARAMETER = sorted(parameters(main.build()), key=lambda each: (each[0], each[2].name))


def arguments(path: tuple[str, ...], command: Any, parameter: Any, value: str) -> list[str]:
    """Return a command line in which one parameter has `value`, and required operands something usual."""
    operands = [each for each in command.params if each.param_type_name == "argument"]
    values = [
        value if each is parameter else OPERANDS.get(each.name, "x")
        for each in operands
        if each.required or each is parameter
    ]
    option = [f"{parameter.opts[0]}={value}"] if parameter.param_type_name == "option" else []
    required = ["--visibility=5s"] if path == ("extend",) and parameter.name != "visibility" else []
    if path[0] == "report" and parameter.name != "engine":
        required = ["--engine=local"]  # a JVM reads these arguments no differently
    if path == ("proxy",) and parameter.name == "proxy_id":
        required = ["--listen=nowhere"]  # with a valid id, it would serve until it is interrupted
    return [*path, "--json", *option, *required, *(["--", *values] if values else [])]


def run(monkeypatch: pytest.MonkeyPatch, *line: str) -> tuple[object, str, str]:
    """Run a command in this process; return its exit code, and what it wrote to stdout and stderr."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    with redirect_stdout(out), redirect_stderr(err):
        code = main.invoke(line)
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("arguments")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(patch, "send", "orders", "hello")[0] == 0
        yield folder


def find(*path_and_name: str) -> tuple[tuple[str, ...], Any, Any]:
    *path, name = path_and_name
    return next(each for each in EVERY_PARAMETER if each[0] == tuple(path) and each[2].name == name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(EVERY_PARAMETER), st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0"))
)
@example(find("send", "file"), "\udcff")
@example(find("import", "file"), "\udcff")
@example(find("show", "archive"), "x" * 3_000)
@example(find("show", "archive"), "\udcff")
@example(find("migrate", "messaging"), "\udcff")
@example(find("dlq", "purge", "topic"), "\udcff")
@example(find("send", "mailbox"), "")
@example(find("report", "traffic", "topic"), "\udcff")
@example(find("log", "show", "first"), "9" * 25)
@example(find("log", "show", "through"), "9" * 25)
@example(find("log", "show", "limit"), "9" * 25)
@example(find("log", "tail", "limit"), "9" * 25)
def test_no_argument_is_a_defect(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: tuple[tuple[str, ...], Any, Any],
    value: str,
) -> None:
    code, out, err = run(monkeypatch, *arguments(*target, value))

    errors = [json.loads(line) for line in err.split("\n") if line]
    assert code in range(6)
    assert not [error for error in errors if error.get("code") == "E_DEFECT"]
    assert code in (0, 3) or len(errors) == 1 or out, "a failure without a word"


def test_an_empty_mailbox_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(monkeypatch, "send", "orders", "x", "--mailbox", "", "--json")

    assert (code, out) == (2, "")
    assert "--mailbox" in json.loads(err)["message"]


@pytest.mark.parametrize(
    ("app", "code"), [("nothing:worker", 2), ("tests.properties.test_command_arguments:worker", 0)]
)
def test_a_worker_command_leaves_the_process_of_the_program_that_runs_it_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch, app: str, code: int
) -> None:
    assert run(monkeypatch, "work", app, "--once")[0] == code
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
