"""Any value in any member of a request of SQS, in both protocols, is accepted or refused."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.sqs.app import ACTIONS
from tests.fuzz.sqs_requests import URL
from tests.fuzz.target import Check, Target

ARN = "arn:aws:sqs:us-east-1:000000000000:orders"
VALID: dict[str, Any] = {"QueueUrl": URL, "QueueName": "orders", "SourceArn": ARN, "MessageBody": "x"}
WORDS = (
    *("Name", "Value", "Key", "Id", "DataType", "StringValue", "BinaryValue", "MessageBody", "ReceiptHandle"),
    *("VisibilityTimeout", "RedrivePolicy", "RedriveAllowPolicy", "FifoQueue", "All", "String", "Number"),
    *("deadLetterTargetArn", "maxReceiveCount", "redrivePermission", "byQueue", "sourceQueueArns", "true"),
    *("Binary.x", "$sqs.created", "aws:x", "orders", "orders.fifo", ARN, URL, "0", "-1", "1e400", ""),
)
TEXTS = st.sampled_from(WORDS) | st.text(max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.sampled_from(("1", "2", "0", "x", "", "1" * 12))
NAMES = st.lists(st.sampled_from(WORDS) | NUMBERS, max_size=3).map(
    lambda parts: "".join(f".{each}" for each in parts)
)


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """The check of a request by an application over a mailbox in memory."""
    with Target("sqs_requests").opened() as check:
        yield check


@st.composite
def json_requests(draw: st.DrawFn) -> bytes:
    """Draw a request of the JSON protocol with one or two members of any value."""
    action = draw(st.sampled_from(sorted(ACTIONS)))
    fields = ACTIONS[action].request.__struct_encode_fields__
    body = {each: VALID[each] for each in fields if each in VALID}
    for name in draw(st.lists(st.sampled_from((*fields, "Unknown")), min_size=1, max_size=2)):
        value = draw(VALUES)
        body[name] = json.dumps(value) if draw(st.booleans()) else value
    return f"{action}\n{json.dumps(body)}".encode()


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    """Draw a request of the query protocol with up to three parameters of any name and value."""
    action = draw(st.sampled_from(sorted(ACTIONS)))
    fields = ACTIONS[action].request.__struct_encode_fields__
    form = {each: str(VALID[each]) for each in fields if each in VALID} | {"Action": action}
    singular = [each.removesuffix("s") for each in fields]
    entries = [f"{action}RequestEntry.1", f"{action}RequestEntry.2"]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*fields, *singular, *entries])) + draw(NAMES)
        form[name] = draw(TEXTS)
    return b"form\n" + urlencode(form).encode()


@pytest.mark.parametrize("strategy", [json_requests(), forms()], ids=["json", "query"])
def test_any_value_of_any_member_is_accepted_or_refused(
    check: Check, strategy: st.SearchStrategy[bytes]
) -> None:
    """No request is a defect of the server, and each answer is JSON or XML."""

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(strategy)
    def run(request: bytes) -> None:
        check(request)

    run()
