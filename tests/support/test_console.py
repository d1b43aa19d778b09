import pytest

from tests.support.console import Session, Step, read_steps

SHOWN, ACTUAL = "01a1f9d9-6291-712a-9b82-dba09c321a4e", "01a2020e-606e-7388-a911-aa943d60dedf"
RECEIPT, TOKEN = "r.AaH52WKRcSqbgtugnDIaTgAAAAIAAAAAAAM", "r.AaICDmBuc4ipEaqUPWDe3wAAAAIAAAAAAAI"


def test_the_commands_of_a_page_are_those_behind_a_dollar_in_its_console_blocks() -> None:
    page = "# Tour\n\n```console\n$ send x\nid\n\n$ ack id\n```\n\n```\n$ other\n```\n"
    page += "\n```console\n$ show id\na\nb\n```\n"

    assert list(read_steps(page)) == [Step("send x", "id"), Step("ack id", ""), Step("show id", "a\nb")]


def test_ids_and_receipts_of_the_page_stand_for_those_of_the_run() -> None:
    printed = {
        "send x": ACTUAL,
        "recv": f"receipt {TOKEN}",
        f"ack {TOKEN}": "1 acked",
        f"show {ACTUAL}": f"{ACTUAL}  acked",
    }
    session = Session(printed.pop)

    session(Step("send x", SHOWN))
    session(Step("recv", f"receipt {RECEIPT}"))
    session(Step(f"ack {RECEIPT}", "1 acked"))
    session(Step(f"show {SHOWN}", f"{SHOWN}  acked"))

    assert not printed


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a  3m  b", "a 12s  b"),
        ("at 2026-11-20T16:45:35.761205Z", "at 2027-01-02T03:04:05Z"),
        ("2026-11-21  orders", "2027-01-02  orders"),
        ("chain " + "a4" * 32, "chain " + "0f" * 32),
        ("built in 4.1 s", "built in 23.45 s"),
        ("one ... three", "one two\ntwo three"),
        ("name\n────", "name\n──────────"),
        ("one\n...\nfour", "one\ntwo\nthree\nfour"),
    ],
)
def test_what_differs_from_run_to_run_matches(shown: str, printed: str) -> None:
    Session(lambda command: printed)(Step("x", shown))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("1 acked", "2 acked"),
        ("1 acked", "1 acked\nand more"),
        ("a.b", "axb"),
        (SHOWN, "no id"),
        (f"{SHOWN} {SHOWN}", f"{SHOWN} {ACTUAL}"),
        ("3m", "three minutes"),
    ],
)
def test_any_other_difference_is_found(shown: str, printed: str) -> None:
    with pytest.raises(AssertionError):
        Session(lambda command: printed)(Step("x", shown))
