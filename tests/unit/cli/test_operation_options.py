"""Options that are arguments of operations have the defaults and bounds of the table of operations."""

import re
from typing import Any, get_args

import msgspec
import pytest
import typer

from postroom.adapters.cli.main import build
from postroom.application.operations.mailbox import OPERATIONS

OPTIONS = [
    ("dlq list", "limit", "list_dead_letters", "limit"),
    ("dlq redrive", "limit", "redrive_dead_letters", "limit"),
    ("redrive show", "limit", "list_redrive_messages", "limit"),
    ("peek", "max", "peek_messages", "limit"),
    ("recv", "wait", "receive_messages", "wait_ms"),
    ("nack", "reason", "nack_messages", "reason"),
    ("nack", "delay", "nack_messages", "delay_ms"),
]
"""Command, option, operation and argument."""


def find_option(path: str, name: str) -> Any:
    command: Any = build()
    for part in path.split():
        command = command.get_command(typer.Context(command), part)
    return next(each for each in command.params if f"--{name}" in each.opts)


@pytest.mark.parametrize(("command", "option", "operation", "argument"), OPTIONS)
def test_an_option_has_the_default_and_the_bounds_of_its_argument(
    command: str, option: str, operation: str, argument: str
) -> None:
    parameter = next(each for each in OPERATIONS[operation].parameters if each.name == argument)
    shown = find_option(command, option)

    assert int(shown.default or 0) == (parameter.default or 0)  # durations are texts, such as "0"
    bounds = [each for each in get_args(parameter.type)[1:] if isinstance(each, msgspec.Meta)]
    maxima = [int(text.replace(",", "")) for text in re.findall(r"(?:up to|1 to) ([\d,]+)", shown.help)]
    assert maxima in ([], [each.le for each in bounds])
