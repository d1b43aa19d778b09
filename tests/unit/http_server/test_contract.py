"""The saved contract is that of the code, and a change that breaks clients is found."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SAVED: dict[str, Any] = json.loads((ROOT / "docs/reference/openapi.json").read_text())


@pytest.fixture(scope="module")
def openapi() -> Any:
    """The script that writes and checks the copy."""
    spec = importlib.util.spec_from_file_location("openapi", ROOT / "scripts/openapi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_saved_copy_is_current(openapi: Any) -> None:
    assert openapi.main(["--check"]) == 0


def remove_a_call(document: Any) -> None:
    del document["paths"]["/v1/peek"]


def require_a_parameter(document: Any) -> None:
    document["paths"]["/v1/dlq"]["get"]["parameters"][0]["required"] = True


def remove_a_parameter(document: Any) -> None:
    del document["paths"]["/v1/dlq"]["get"]["parameters"][0]


def require_a_field(document: Any) -> None:
    document["components"]["schemas"]["Send"]["required"].append("idem_key")


def remove_a_field(document: Any) -> None:
    del document["components"]["schemas"]["Send"]["properties"]["sticky_key"]


def lower_a_maximum(document: Any) -> None:
    document["components"]["schemas"]["Recv"]["properties"]["max_messages"]["maximum"] = 10


def change_a_type(document: Any) -> None:
    document["components"]["schemas"]["RedriveDeadLetters"]["properties"]["limit"] = {"type": "string"}


def require_a_body(document: Any) -> None:
    document["paths"]["/v1/ack/{msg_id}"]["post"]["requestBody"]["required"] = True


def remove_a_field_of_an_answer(document: Any) -> None:
    shape = document["components"]["schemas"]["SendAnswer"]
    del shape["properties"]["duplicate"]
    shape["required"].remove("duplicate")


def answer_null(document: Any) -> None:
    shape = document["components"]["schemas"]["SendAnswer"]["properties"]
    shape["msg_id"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}


BREAKING = [
    remove_a_call,
    require_a_parameter,
    remove_a_parameter,
    require_a_field,
    remove_a_field,
    lower_a_maximum,
    change_a_type,
    require_a_body,
    remove_a_field_of_an_answer,
    answer_null,
]


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_a_change_that_breaks_clients_is_found(openapi: Any, change: Callable[[Any], None]) -> None:
    changed = copy.deepcopy(SAVED)
    change(changed)
    assert list(openapi.breaking_changes(SAVED, changed))


def add_a_call(document: Any) -> None:
    document["paths"]["/v2/send"] = document["paths"]["/v1/send"]


def add_an_optional_field(document: Any) -> None:
    document["components"]["schemas"]["Send"]["properties"]["color"] = {"type": "string"}


def raise_a_maximum(document: Any) -> None:
    document["components"]["schemas"]["Recv"]["properties"]["max_messages"]["maximum"] = 1_000


def add_a_field_to_an_answer(document: Any) -> None:
    shape = document["components"]["schemas"]["SendAnswer"]
    shape["properties"]["shard"] = {"type": "integer"}
    shape["required"].append("shard")


def add_a_setting_to_the_policy_which_is_both_sent_and_answered(document: Any) -> None:
    shape = document["components"]["schemas"]["TopicPolicy"]
    assert shape["additionalProperties"] is False
    shape["properties"]["color"] = {"type": "string"}


COMPATIBLE = [
    add_a_call,
    add_an_optional_field,
    raise_a_maximum,
    add_a_field_to_an_answer,
    add_a_setting_to_the_policy_which_is_both_sent_and_answered,
]


@pytest.mark.parametrize("change", COMPATIBLE, ids=lambda change: change.__name__)
def test_a_change_that_breaks_nobody_passes(openapi: Any, change: Callable[[Any], None]) -> None:
    changed = copy.deepcopy(SAVED)
    change(changed)
    assert list(openapi.breaking_changes(SAVED, changed)) == []


def test_every_example_is_valid_by_its_schema() -> None:
    import jsonschema_rs

    examples = 0
    for operations in SAVED["paths"].values():
        for operation in operations.values():
            contents = [operation.get("requestBody", {}), operation["responses"]["200"]]
            for content in (each for part in contents for each in part.get("content", {}).values()):
                if "example" in content:
                    schema = content["schema"] | {"components": SAVED["components"]}
                    jsonschema_rs.validate(schema, content["example"])
                    examples += 1
    assert examples > 10
