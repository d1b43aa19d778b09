"""Words: what word search compares, made the same way of what is stored and of what is asked for.

A word is a run of letters, marks (accents, vowel signs), digits and underscores in any script, folded so that
spellings that differ only in case or in their encoding are one word: `Straße` is `STRASSE`, an `é` of one
character is an `e` with an accent. Scripts without blanks between words make long words of it; there the
search for parts of a text serves better. No database's own tokenizer or dictionary has a say.
"""

import re
from unicodedata import category, normalize

import msgspec

from postroom.domain.errors import InvalidRequest

__all__ = ["MAX_CHARS", "MAX_WORD_CHARS", "Word", "has_words", "parse_words", "words_of"]

MAX_CHARS = 65_536
"""Characters of a text that count, once it is folded; and so the words of a message fit any index."""
MAX_WORD_CHARS = 255
"""Characters of a word that count, stored or asked for; what follows them is cut off."""
MAX_MATCH_CHARS = 1_000


class Word(msgspec.Struct, frozen=True):
    """Ask for a word or, by a prefix, for every word that begins with it."""

    text: str
    is_prefix: bool = False


def words_of(text: str) -> list[str]:
    """Return the words of a text in their order, those that occur twice included."""
    return [word[:MAX_WORD_CHARS] for word in _fold(text)[:MAX_CHARS].translate(_BLANKS).split()]


def parse_words(match: str) -> tuple[Word, ...]:
    """Return the words that a search such as `refund pay*` asks for; one right before a `*` is a beginning.

    Raises: InvalidRequest when there is no word in it, or too much text.
    """
    if len(match) > MAX_MATCH_CHARS:
        raise InvalidRequest(
            f"The words to match have {len(match)} characters; give at most {MAX_MATCH_CHARS}."
        )
    found = _ASKED.findall(_fold(match).translate(_BLANKS_BUT_STARS))
    if not found:
        raise InvalidRequest(
            f"There is no word in {match!r} to match; give words of letters or digits, such as 'refund pay*'."
        )
    return tuple(dict.fromkeys(Word(word[:MAX_WORD_CHARS], bool(star)) for word, star in found))


def has_words(words: set[str], asked: tuple[Word, ...]) -> bool:
    """Tell whether each of the words asked for is among words."""
    return all(
        any(word.startswith(each.text) for word in words) if each.is_prefix else each.text in words
        for each in asked
    )


def _fold(text: str) -> str:
    return normalize("NFKC", text).casefold()


class _Blanks(dict[int, str | int]):
    """Map every character that no word contains to a blank; filled as characters are met."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        is_in_word = character.isalnum() or character == "_" or category(character).startswith("M")
        self[code] = code if is_in_word else " "
        return self[code]


_BLANKS = _Blanks()
_BLANKS_BUT_STARS = _Blanks({ord("*"): "*"})
_ASKED = re.compile(r"([^ *]+)(\*?)")
