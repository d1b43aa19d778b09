import json
from typing import Any

import pytest

from postroom.application.ingest.broker_access import Line, split_documents

EVENTS = [
    {"id": "1", "data": {"a": [1, "}"], "b": '[\\"'}},
    {"id": "2", "data": []},
    {"id": "3"},
]


def split(text: str) -> list[Line]:
    lines = enumerate(text.encode().split(b"\n"), 1)
    return list(split_documents((number, line) for number, line in lines if line.strip()))


def read(text: str) -> list[Any]:
    return [json.loads(document) for _, document in split(text)]


@pytest.mark.parametrize("indent", [None, 0, 1, 4, "\t"])
@pytest.mark.parametrize("is_array", [True, False])
def test_documents_are_found_in_whatever_way_they_are_printed(indent: Any, is_array: bool) -> None:
    documents = [EVENTS] if is_array else EVENTS
    assert read("\n".join(json.dumps(each, indent=indent) for each in documents)) == EVENTS


def test_an_array_with_an_element_in_each_line_is_read() -> None:
    assert read("[\n" + ",\n".join(map(json.dumps, EVENTS)) + "\n]") == EVENTS


def test_a_document_has_the_number_of_its_first_line() -> None:
    assert [number for number, _ in split('{"a": 1}\n{\n"a": 1\n}\nAAAA\n[{},\n{}]')] == [1, 2, 5, 6, 6]


def test_a_line_that_is_cut_off_does_not_swallow_those_after_it() -> None:
    assert [line for _, line in split('{"a": {"b": 1}\n{"c": 1}\n{"d": 2}')] == [
        b'{"a": {"b": 1}',
        b'{"c": 1}',
        b'{"d": 2}',
    ]


def test_what_has_no_end_is_a_document_by_itself() -> None:
    assert split("[1,\n2") == [(1, b"[1,"), (2, b"2")]
    assert split("[1 2]") == [(1, b"[1 2]")]
