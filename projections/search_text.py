"""Rows of the search tables: custom headers, text and words.

They are defined by `postroom.domain.search` and computed here for many messages at once. ASCII text is
processed in bulk, without Python objects; other text is passed to the functions of the domain.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

import msgspec
import polars as pl
import pyarrow as pa

from postroom.domain.search import IDS, TEXT_HEADERS, WORD_HEADERS, BodyRules, body_words
from postroom.domain.tokenizer import MAX_CHARS, MAX_WORD_CHARS, Word, tokenize
from postroom.projections.models.messages import PROJECTION, uuid_text

__all__ = ["compact_tables", "header_words", "indexed_parts", "is_part_of_id", "search_tables"]

_decode_headers = msgspec.json.Decoder(list[dict[str, str]]).decode

_TO_LOWER_CASE = bytes(
    ord(chr(code).lower()) if chr(code).isalnum() or chr(code) == "_" else ord(" ") for code in range(128)
) + bytes(range(128, 256))
"""Translation table for ASCII: letters to lower case, and characters outside words to blanks."""
_PLAIN_ID = "^[0-9a-f-]*$"
"""An id that no text index has: searches find its parts by comparing the ids themselves."""
LONG_TEXT = "\u00ac"
"""Marks a message some of whose words may not be indexed; it is no word."""
SURE_BYTES = MAX_CHARS // 18
"""Size up to which a text is indexed as a whole: normalised, it has up to 18 times as many characters."""
MAX_HEADER_WORDS = 8
"""Number of words of a custom header that are looked up."""
_TOO_LONG = f"[A-Za-z0-9_]{{{MAX_WORD_CHARS + 1}}}"


def search_tables(mailbox_rows: pl.DataFrame, bodies: BodyRules) -> dict[str, pa.Table]:
    """Return the rows of the search tables for rows of the `mailbox` table.

    Arguments:
        mailbox_rows: columns `id`, `timestamp`, all headers and `envelope_blob`.
        bodies: topics whose bodies are searched for words.

    Returns: rows of the tables `header` (name, value, timestamp, id; one for each custom header) and `text`
        (id, the `searchable_text`, the `searchable_words` each between blanks). Strings have Arrow's type
        `large_string`.
    """
    rows = _with_custom_text(mailbox_rows)
    header = rows.select("name", "value", "timestamp", "id").explode("name", "value", keep_nulls=False)
    text = {"id": rows["id"], "text": _texts(rows), "words": _all_words(rows, bodies)[0]}
    return {"header": header.to_arrow(), "text": pl.DataFrame(text).to_arrow()}


def compact_tables(mailbox_rows: pl.DataFrame, bodies: BodyRules) -> dict[str, pl.DataFrame]:
    """Return the rows of the tables of SQL databases, which have no text twice.

    Arguments:
        mailbox_rows, bodies: see `search_tables`.

    Returns: rows of the tables `mailbox` (a message id that is the stream id is null, and `text` is the
        `searchable_text` where SQL can't compute it), `header` (the names of custom headers), `text` (id and
        words of messages whose bodies are searched), and `search` (id; the text without plain ids; the words,
        each between blanks, and `LONG_TEXT`).
    """
    rows = _with_custom_text(mailbox_rows)
    words, is_covered = _all_words(rows, bodies)
    indexed_ids = (pl.when(~pl.col(name).str.contains(_PLAIN_ID)).then(name).alias(name) for name in IDS)
    text = _texts(rows.with_columns(indexed_ids))
    is_odd = rows.select(
        pl.any_horizontal(
            pl.col("custom_headers").str.contains("\\", literal=True),
            *(pl.col(name).str.contains("\0", literal=True) for name in TEXT_HEADERS),
            *(
                pl.col(name).str.len_bytes() != pl.col(name).str.len_chars()
                for name in (*TEXT_HEADERS, "custom_headers")
            ),
        ).fill_null(value=False)
    ).to_series()
    odd_text = pl.repeat(None, rows.height, dtype=pl.String, eager=True)
    is_stream = pl.col("message_id") == uuid_text("stream")
    mark = pl.when(text.str.len_bytes() > SURE_BYTES).then(pl.lit(f"{LONG_TEXT} "))
    return {
        PROJECTION.name: rows.select(
            *(name for name in PROJECTION.stored_schema if name != "message_id"),
            pl.when(~is_stream).then("message_id").alias("message_id"),
            text=_replace_odd(odd_text, is_odd, lambda: _texts(rows.filter(is_odd))),
        ),
        "header": rows.select(pl.col("name").explode(keep_nulls=False).unique()),
        "text": pl.DataFrame({"id": rows["id"], "words": words}).filter(is_covered),
        "search": pl.select(rows["id"], text, pl.concat_str(words, mark, ignore_nulls=True).alias("words")),
    }


def header_words(name: str, value: str) -> list[Word]:
    """Return words that every message with a custom header has, unless it has `LONG_TEXT`."""
    return [Word(each) for each in dict.fromkeys(tokenize(f"{name}\n{value}"))][:MAX_HEADER_WORDS]


def is_part_of_id(part: str) -> bool:
    """Return whether a part of text may be part of a plain id, which no text index has."""
    return re.match(_PLAIN_ID, part) is not None


def indexed_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts of text that a text index finds; if all may be parts of ids, the longest of them."""
    return [part for part in parts if not is_part_of_id(part)] or sorted(parts, key=len)[-1:]


def _with_custom_text(mailbox_rows: pl.DataFrame) -> pl.DataFrame:
    headers = _custom_headers(mailbox_rows["custom_headers"])
    return mailbox_rows.join(headers, on="custom_headers", how="left", maintain_order="left")


def _custom_headers(column: pl.Series) -> pl.DataFrame:
    """Return the distinct custom headers with their names, their values, and both as text."""
    distinct_values = column.drop_nulls().unique()
    header_maps = _decode_headers(f"[{','.join(distinct_values)}]")
    ends = pa.array(accumulate(map(len, header_maps), initial=0), pa.int64())
    return pl.DataFrame(
        {
            "custom_headers": distinct_values,
            "name": pl.Series(_lists(ends, chain.from_iterable(header_maps))),
            "value": pl.Series(_lists(ends, chain.from_iterable(map(dict.values, header_maps)))),
            "custom_text": pl.Series(
                ["\n".join(filter(None, (*headers, *headers.values()))) for headers in header_maps],
                dtype=pl.String,
            ),
        }
    )


def _lists(ends: pa.Array, items: Iterable[str]) -> pa.Array:
    return pa.LargeListArray.from_arrays(ends, pa.array(items, pa.large_string()))


def _texts(rows: pl.DataFrame) -> pl.Series:
    lines = _header_text(rows, TEXT_HEADERS)
    is_odd = lines.str.len_bytes() != lines.str.len_chars()
    return _replace_odd(lines.str.to_lowercase(), is_odd, lambda: map(str.lower, lines.filter(is_odd)))


def _words(rows: pl.DataFrame) -> pl.Series:
    """Return the words of headers; in ASCII text, one pass turns all characters outside words into blanks."""
    lines = _header_text(rows, WORD_HEADERS)
    size = lines.str.len_bytes()
    is_odd = (size != lines.str.len_chars()) | (size > MAX_CHARS)
    is_long = (size > MAX_WORD_CHARS) & ~is_odd
    if is_long.any():
        is_odd = is_odd | (is_long & lines.str.contains(_TOO_LONG))
    padded_lines = pl.select(pl.concat_str(pl.lit(" "), lines, pl.lit(" "))).to_series()
    offsets, data = padded_lines.to_arrow(compat_level=pl.CompatLevel.oldest()).buffers()[1:]
    folded_text = pa.py_buffer(data.to_pybytes().translate(_TO_LOWER_CASE))
    words = pl.Series(pa.LargeStringArray.from_buffers(len(padded_lines), offsets, folded_text))
    return _replace_odd(words, is_odd, lambda: (_join_words(tokenize(each)) for each in lines.filter(is_odd)))


def _all_words(rows: pl.DataFrame, bodies: BodyRules) -> tuple[pl.Series, pl.Series]:
    """Return the words of headers and bodies, and whether the body is searched."""
    words = _words(rows)
    is_covered = rows["topic"].is_in([topic for topic in rows["topic"].unique() if bodies.cover(topic)])
    return _replace_odd(
        words, is_covered, lambda: _with_body(words.filter(is_covered), rows.filter(is_covered))
    ), is_covered


def _header_text(rows: pl.DataFrame, headers: tuple[str, ...]) -> pl.Series:
    """Return the headers and the custom headers that are not empty, a line each."""
    columns = (*headers, "custom_text")
    lines = [pl.when(pl.col(name) != "").then(pl.col(name)) for name in columns]
    return rows.select(pl.concat_str(lines, separator="\n", ignore_nulls=True).alias("text")).to_series()


def _with_body(words: pl.Series, rows: pl.DataFrame) -> Iterable[str]:
    for own, envelope in zip(words, rows["envelope_blob"], strict=True):
        yield own + _join_words(body_words(envelope or b""))


def _join_words(words: list[str]) -> str:
    return " ".join(("", *words, ""))


def _replace_odd(usual: pl.Series, is_odd: pl.Series, odd: Callable[[], Iterable[str]]) -> pl.Series:
    """Return the column with its odd values replaced by `odd()`, which is called only if there are any."""
    if not is_odd.any():
        return usual
    return usual.scatter(is_odd.arg_true(), pl.Series(list(odd()), dtype=pl.String))
