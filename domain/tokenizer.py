"""Tokenizer of the word search, applied to stored text and to search queries alike.

A word is a run of letters, marks (accents, vowel signs), digits and underscores in any script, normalised so
that spellings that differ only in case or in their encoding are equal: `Straße` equals `STRASSE`, and a
precomposed `é` equals `e` with a combining accent. In scripts that do not separate words by blanks, a whole
run is one word; use `text` searches there. The tokenizers and dictionaries of the databases are not used.
"""

import re
from unicodedata import category, normalize

import msgspec

from postroom.domain.errors import InvalidRequest

__all__ = ["MAX_CHARS", "MAX_WORD_CHARS", "Word", "has_words", "parse_words", "tokenize"]

MAX_CHARS = 65_536
"""Indexed characters of a normalised text; the rest is ignored, so that its words fit any index."""
MAX_WORD_CHARS = 255
"""Significant characters of a word, in stored text and in queries; the rest is cut off."""
MAX_MATCH_CHARS = 1_000


class Word(msgspec.Struct, frozen=True):
    """Word of a query; as a prefix, it matches every word that begins with it."""

    text: str
    is_prefix: bool = False


def tokenize(text: str) -> list[str]:
    """Return the words of a text in order, with repetitions."""
    return [word[:MAX_WORD_CHARS] for word in _normalize(text)[:MAX_CHARS].translate(_BLANKS).split()]


def parse_words(match: str) -> tuple[Word, ...]:
    """Return the words of a query such as `refund pay*`; a word followed by `*` is a prefix.

    Raises: InvalidRequest when the query has no word or is too long.
    """
    if len(match) > MAX_MATCH_CHARS:
        raise InvalidRequest(
            f"The words to match have {len(match)} characters; give at most {MAX_MATCH_CHARS}."
        )
    words = _QUERY_WORD.findall(_normalize(match).translate(_BLANKS_BUT_STARS))
    if not words:
        raise InvalidRequest(
            f"No word in {match!r} to match; give words of letters or digits, such as 'refund pay*'."
        )
    return tuple(dict.fromkeys(Word(word[:MAX_WORD_CHARS], bool(star)) for word, star in words))


def has_words(words: set[str], query: tuple[Word, ...]) -> bool:
    """Return whether `words` contains every word of the query."""
    return all(
        any(word.startswith(each.text) for word in words) if each.is_prefix else each.text in words
        for each in query
    )


def _normalize(text: str) -> str:
    return normalize("NFKC", text).casefold()


class _Blanks(dict[int, str | int]):
    """Translation table, filled on demand, that maps characters outside words to a blank."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        is_in_word = character.isalnum() or character == "_" or category(character).startswith("M")
        self[code] = code if is_in_word else " "
        return self[code]


_BLANKS = _Blanks()
_BLANKS_BUT_STARS = _Blanks({ord("*"): "*"})
_QUERY_WORD = re.compile(r"([^ *]+)(\*?)")
