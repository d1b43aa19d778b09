"""Check payloads against a JSON Schema."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import msgspec
from google.protobuf import any_pb2

from postroom.domain.errors import InvalidRequest

MAX_PROBLEMS = 5
"""Problems named for one payload: enough to see what is wrong, few enough to read."""
MASK = "the value"
"""Stands in problems for what payloads hold: it may be personal data, and problems are logged."""


class JsonSchema:
    """Check JSON payloads by the draft that the schema's `$schema` names, 2020-12 where it names none.

    A `$ref` may lead to other files in the schema's folder, and nowhere else: nothing is ever fetched.
    """

    def __init__(self, file: Path) -> None:
        """Take the schema of a file; raise `InvalidRequest` when it can't be read or is no JSON Schema."""
        schema, references = _read(file), _References(file.absolute().parent)
        try:
            self._validator = jsonschema_rs.validator_for(
                schema, retriever=references.retrieve, base_uri=file.absolute().as_uri(), mask=MASK
            )
        except (ValueError, OverflowError) as error:
            problem = references.problem or str(error)
            if isinstance(error, jsonschema_rs.ValidationError) and not references.problem:
                problem = f"{_place(error.instance_path)}{error.message}"
            raise InvalidRequest(f"{file} is no JSON Schema that can be used: {problem}.") from error

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield what is wrong with a payload, in words that go on from `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield f"is no JSON: {error}"
            return
        except RecursionError:
            yield "is JSON that is nested too deeply to be checked"
            return
        try:
            for found in islice(self._validator.iter_errors(value), MAX_PROBLEMS):
                yield f"breaks its schema: {_place(found.instance_path)}{found.message}"
        except (ValueError, OverflowError) as error:
            yield f"can't be checked: {error}"


class _References:
    """Answer what a schema refers to, and remember why one was not answered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.problem: str | None = None

    def retrieve(self, uri: str) -> Any:
        parts = urlsplit(uri)
        path = Path(unquote(parts.path)).resolve()
        try:
            if parts.scheme != "file" or not path.is_relative_to(self._folder):
                raise InvalidRequest(
                    f"it refers to {uri}, but only files in its own folder are read, and nothing is fetched."
                )
            return _read(path)
        except InvalidRequest as error:
            self.problem = str(error).removesuffix(".")
            raise


def _read(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"The schema {file} can't be read: {error.strerror or error}; name a file that exists."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The schema {file} is no JSON: {error}.") from error


def _place(path: list[str | int]) -> str:
    """Return where in a document something is, as the beginning of a sentence."""
    return f"at /{'/'.join(map(str, path))}: " if path else ""
