"""Tests of each call of the contract, which Schemathesis makes from it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemathesis import BaseSchema
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test

CONTRACT = Path(__file__).parents[3] / "docs/reference/openapi.json"


def read_contract() -> dict[str, Any]:
    """Return the contract of the HTTP interface."""
    contract: dict[str, Any] = json.loads(CONTRACT.read_text("utf-8"))
    return contract


def names_of_calls() -> list[str]:
    """Return the method and the path of each call, such as `POST /v1/send`."""
    return [
        f"{method.upper()} {path}"
        for path, calls in read_contract()["paths"].items()
        for method in calls
        if method != "parameters"
    ]


def try_call(schema: BaseSchema, call: str, test: Callable[..., None], fixtures: Mapping[str, Any]) -> None:
    """Run a test with the cases of a call.

    `schema.parametrize()` would make the cases of all calls while tests are collected, in each worker; the
    public `schemathesis.pytest.from_fixture` does not work with pytest 9.2.

    Arguments:
        test: takes each case as `case`, beside the fixtures.
    """
    method, path = call.split()
    run = build_operation_test(
        config=schema.config,
        operation=schema[path][method],
        test_func=test,
        given_kwargs={},
        feedback=FeedbackSources(),
    )
    run(**fixtures)
