"""Words of stored text and of queries."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from postroom.domain.errors import InvalidRequest
from postroom.domain.tokenizer import MAX_CHARS, MAX_WORD_CHARS, Word, has_words, parse_words, tokenize

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Order 42 refused!", ["order", "42", "refused"]),
        ("admin.users-created/v2", ["admin", "users", "created", "v2"]),
        ("snake_case is one", ["snake_case", "is", "one"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("ΟΔΟΣ οδός", ["οδοσ", "οδόσ"]),
        ("caf\u00e9 cafe\u0301", ["caf\u00e9", "caf\u00e9"]),
        ("ﬁnal Ⅳ \uff14\uff12", ["final", "iv", "42"]),
        ("हिन्दी עִבְרִית", ["हिन्दी", "עִבְרִית"]),
        ("東京都。大阪", ["東京都", "大阪"]),
        ("a\0b\x1ac\td", ["a", "b", "c", "d"]),
        ("*%'\"\\ -", []),
        ("x" * 300 + " y", ["x" * MAX_WORD_CHARS, "y"]),
    ],
)
def test_a_word_is_a_folded_run_of_letters_marks_digits_and_underscores(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


def test_only_the_beginning_of_a_long_text_has_words() -> None:
    assert tokenize("a " * MAX_CHARS) == ["a"] * (MAX_CHARS // 2)


@given(texts)
def test_a_query_for_a_whole_text_matches_it(text: str) -> None:
    words = tokenize(text)
    assume(words)
    asked = parse_words(re.sub("[*\uff0a\ufe61]", " ", text))
    assert asked == tuple(Word(word) for word in dict.fromkeys(words))
    assert has_words(set(words), asked)


@given(texts)
def test_no_word_contains_a_special_character_of_a_query_language(text: str) -> None:
    for word in tokenize(text):
        assert word
        assert not set(word) & set(" *'\"\\:&|!()<>\0")
        assert word[0].isalnum() or word[0] == "_" or not word[0].isascii()


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ("refund", (Word("refund"),)),
        ("Refund PAY*", (Word("refund"), Word("pay", is_prefix=True))),
        ("admin.us*", (Word("admin"), Word("us", is_prefix=True))),
        ("pay* pay", (Word("pay", is_prefix=True), Word("pay"))),
        ("pay pay", (Word("pay"),)),
        ("a*b", (Word("a", is_prefix=True), Word("b"))),
        ("* pay **", (Word("pay"),)),
        ("x" * 300 + "*", (Word("x" * MAX_WORD_CHARS, is_prefix=True),)),
    ],
)
def test_a_word_followed_by_a_star_is_a_prefix(match: str, words: tuple[Word, ...]) -> None:
    assert parse_words(match) == words


@pytest.mark.parametrize("match", ["", " ", "*", "?!", "'\""])
def test_a_query_without_words_is_refused(match: str) -> None:
    with pytest.raises(InvalidRequest, match="No word in"):
        parse_words(match)


def test_a_query_that_is_too_long_is_refused() -> None:
    assert len(parse_words("ab " * 333)) == 1
    with pytest.raises(InvalidRequest, match="have 1001 characters; give at most 1000"):
        parse_words("a" * 1_001)


@pytest.mark.parametrize(
    ("match", "is_found"),
    [("pay", False), ("pay*", True), ("payment due", True), ("payment owed", False), ("paymentx*", False)],
)
def test_every_word_or_prefix_must_match(match: str, is_found: bool) -> None:
    assert has_words({"payment", "due"}, parse_words(match)) == is_found
