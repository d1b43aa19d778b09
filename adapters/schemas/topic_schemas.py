"""The schemas of a namespace, by topic."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf import any_pb2

from postroom.adapters.schemas.json_schema import JsonSchema
from postroom.adapters.schemas.protobuf import Descriptors, ProtobufSchema
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.domain.search import topic_matches

_MAX_CACHED_TOPICS = 10_000
_T = TypeVar("_T")


class Schema(Protocol):
    """A schema of payloads."""

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield a payload's problems, each as a predicate of `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """

    def decode(self, payload: any_pb2.Any, data: bytes) -> Any:
        """Return a payload as a value of JSON; raise `InvalidRequest` when it can't be decoded."""


class TopicRules(Generic[_T]):
    """Rules by topic, of which the first that matches applies."""

    def __init__(self, rules: Iterable[tuple[str, _T]]) -> None:
        """Take rules by topic, an exact name or glob."""
        self._rules = tuple(rules)
        self._by_topic: dict[str, _T | None] = {}

    def find(self, topic: str) -> _T | None:
        """Return the rule of a topic, or None if it has none."""
        if topic in self._by_topic:
            return self._by_topic[topic]
        rule = next((rule for pattern, rule in self._rules if topic_matches(pattern, topic)), None)
        if len(self._by_topic) < _MAX_CACHED_TOPICS:
            self._by_topic[topic] = rule
        return rule


class SchemaCompiler:
    """Compiler of schemas, which reads each file of descriptors once."""

    def __init__(self) -> None:
        """Begin without files."""
        self._descriptors: dict[Path, Descriptors] = {}

    def compile(self, schema: PayloadSchema) -> Schema | None:
        """Return a compiled schema, or None if it names no file; raise `InvalidRequest` if it is invalid."""
        if schema.file is None:
            return None
        if schema.format == SchemaFormat.JSON_SCHEMA:
            return JsonSchema(schema.file)
        if schema.file not in self._descriptors:
            self._descriptors[schema.file] = Descriptors(schema.file)
        return ProtobufSchema(
            self._descriptors[schema.file],
            schema.message_name or "",
            allows_unknown_fields=schema.allows_unknown_fields,
        )
