"""Calls to be copied are safe to look at, and there is none where no call would do."""

import re
import shlex

from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.console.snippets import MAX_CHARS, Endpoint, read_snippets, send_snippets, shell_quote
from postroom.application.messages import NewMessage
from postroom.application.text import printable

ENDPOINT = Endpoint("http://127.0.0.1:8080", "acme@one")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(text=TEXT)
def test_a_word_of_a_shell_stands_for_its_text_and_has_nothing_invisible(text: str) -> None:
    word = shell_quote(text)
    assert printable(word, multiline=False) == word
    if word.startswith("$'"):
        unescaped = re.sub(
            rb"\\([0-7]{3}|.)",
            lambda match: bytes([int(match[1], 8)]) if len(match[1]) == 3 else match[1],
            word[2:-1].encode(),
        )
        assert unescaped.decode() == text
    else:
        assert shlex.split(word) == [text]


@given(id_=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_no_call_has_an_invisible_character_or_a_line_end_in_an_id(id_: str) -> None:
    for copy in read_snippets(ENDPOINT, id_):
        assert copy.text is None or printable(copy.text) == copy.text
        assert copy.text is None or copy.text.count("\n") == (6 if copy.name == "Python" else 0)


def test_what_no_call_can_say_has_a_reason_instead() -> None:
    cases = {
        "curl": NewMessage(topic="t", payload=bytes(40_000)),
        "Python": NewMessage(topic="t", payload=b"", attrs={"x": "\N{RIGHT-TO-LEFT OVERRIDE}" * 20_000}),
        "Command line": NewMessage(topic="t", payload=b"", attrs={"a=b": "c"}),
    }
    for name, message in cases.items():
        (copy,) = (each for each in send_snippets(ENDPOINT, message) if each.name == name)
        assert (copy.text, bool(copy.reason)) == (None, True)
    alone = ENDPOINT._replace(url="")
    assert [each.text is None for each in read_snippets(alone, "m")] == [True, False, True]
    calls = send_snippets(alone, NewMessage(topic="t", payload=b"x"))
    assert [each.text for each in calls] == [None, "postroom --mailbox=acme@one send -- t x", None]
    below = ENDPOINT._replace(url="https://example.org/queue")
    assert [each.text is None for each in read_snippets(below, "m")] == [False, False, True]
    assert [each.text is None for each in send_snippets(below, NewMessage(topic="t", payload=b""))] == [
        False,
        True,
        True,
    ]
    large = NewMessage(topic="t", payload=b"", attrs={"x": "y" * (MAX_CHARS + 1)})
    assert all(each.text is None for each in send_snippets(ENDPOINT, large))


def test_a_call_without_a_token_has_no_header_for_one() -> None:
    texts = [each.text or "" for each in read_snippets(ENDPOINT._replace(needs_token=False), "m")]
    assert not any("POSTROOM_TOKEN" in each for each in texts)
