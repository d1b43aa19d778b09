"""The table of operations: what it derives from the signatures of the port."""

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Operation, Parameter, read_operations
from postroom.domain.errors import Rejected

NUMBERS = (1.5, True, -1, 10**30)
TEXTS = (b"x", "", "a\0b", "\ud800", "x" * 70_000)
VALUES = (*NUMBERS, *TEXTS, object(), [object()], {"a": 1}, None)
PARAMETERS = [
    pytest.param(operation, parameter, id=f"{operation.name}.{parameter.name}")
    for operation in read_operations(Mailbox).values()
    for parameter in operation.parameters
]


@pytest.mark.parametrize(("operation", "parameter"), PARAMETERS)
def test_an_argument_of_any_type_is_accepted_or_rejected_in_words(
    operation: Operation, parameter: Parameter
) -> None:
    refusals = []
    for value in VALUES:
        try:
            parameter.check(value)
        except Rejected as refusal:
            refusals.append(str(refusal))
    assert refusals
    assert all(each.endswith(".") for each in refusals)


def test_a_receive_takes_a_topic_or_a_list_of_topics() -> None:
    (topic, *_) = read_operations(Mailbox)["receive_messages"].parameters
    assert topic.check("shop") == "shop"
    assert topic.check(["shop", "bank"]) == ["shop", "bank"]
    with pytest.raises(Rejected, match="topic must be a list, not of type int"):
        topic.check(1)
