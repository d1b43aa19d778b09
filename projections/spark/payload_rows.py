"""Rows of `postroom_payloads`: sent messages with their decoded payloads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa

from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest
from postroom.projections.log_reader import LogReader, PayloadDecoder, Range
from postroom.projections.models.messages import SENT
from postroom.projections.spark.event_rows import EventFilter, EventRows

_SCALARS: dict[pa.DataType, Any] = {
    pa.string(): str,
    pa.bool_(): bool,
    pa.int8(): Annotated[int, msgspec.Meta(ge=-(2**7), le=2**7 - 1)],
    pa.int16(): Annotated[int, msgspec.Meta(ge=-(2**15), le=2**15 - 1)],
    pa.int32(): Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
    pa.int64(): Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    pa.float32(): float,
    pa.float64(): float,
    pa.date32(): date,
    pa.binary(): bytes,
}
_UNFIT = (pa.ArrowException, OverflowError)
"""Errors that Arrow raises for a value that does not fit its type."""


def check_document_type(place: str, type_: pa.DataType) -> None:
    """Raise InvalidRequest unless a type is a struct, array or map that JSON values can have.

    Arguments:
        place: name of the value for errors, such as `payload.order`.
    """
    if not (pa.types.is_struct(type_) or pa.types.is_list(type_) or pa.types.is_map(type_)):
        raise InvalidRequest(f"{place} is declared as {type_}; declare a string, struct, array or map.")
    json_type(place, type_)


def json_type(place: str, type_: pa.DataType) -> Any:
    """Return the msgspec type that decodes JSON values of an Arrow type.

    Raises: InvalidRequest for a type without JSON values, and for one that is not nullable.
    """
    if pa.types.is_struct(type_):
        fields = {field.name: _nullable(f"{place}.{field.name}", field) for field in type_}
        if len(fields) != type_.num_fields:
            raise InvalidRequest(f"{place} is declared with two fields of the same name; rename one.")
        return TypedDict("Object", fields, total=False)  # type: ignore[operator]  # made of a declared schema
    if pa.types.is_list(type_):
        return list[_nullable(f"{place}[]", type_.value_field)]  # type: ignore[misc]
    if pa.types.is_map(type_) and type_.key_type == pa.string():
        return dict[str, _nullable(f"{place}[]", type_.item_field)]  # type: ignore[misc]
    if pa.types.is_timestamp(type_):
        return datetime
    if pa.types.is_decimal(type_):
        return Decimal
    if type_ in _SCALARS:
        return _SCALARS[type_]
    raise InvalidRequest(
        f"{place} is declared as {type_}, which JSON lacks; declare it as string and convert it."
    )


def _nullable(place: str, field: pa.Field) -> Any:
    if not field.nullable:
        raise InvalidRequest(
            f"{place} is declared as not null, but a payload may lack it; declare it without NOT NULL."
        )
    return json_type(place, field.type) | None


class DocumentColumn:
    """A column of a declared type, decoded from JSON documents."""

    def __init__(self, type_: pa.DataType) -> None:
        """Take a type that `check_document_type` allows."""
        self._type = type_
        self._decode = _decoder(type_)
        self._fields: dict[str, tuple[pa.DataType, Any]] = {}
        if pa.types.is_struct(type_):
            self._fields = {field.name: (field.type, _decoder(field.type)) for field in type_}

    def array(self, documents: Sequence[str | None]) -> tuple[pa.Array, list[str | None]]:
        """Return documents as an Arrow array, and the problem of each document or None.

        In an object, only the fields that do not have their declared type are null.
        """
        values, problems = [], []
        for document in documents:
            value, problem = (None, None) if document is None else self._value(document)
            values.append(value)
            problems.append(problem)
        try:
            return pa.array(values, self._type), problems
        except _UNFIT:  # such as a decimal number with too many digits
            fitting = [self._fit(value) for value in values]
        values = [value for value, _ in fitting]
        problems = [old or new for old, (_, new) in zip(problems, fitting, strict=True)]
        return pa.array(values, self._type), problems

    def _value(self, document: str) -> tuple[Any, str | None]:
        try:
            return self._decode(document), None
        except msgspec.DecodeError as error:
            problem = f"does not have the declared type: {error}"
        try:
            raw = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return None, problem
        return self._each_field(
            raw, lambda decode, _, value: decode(value)
        ) if self._fields else None, problem

    def _fit(self, value: Any) -> tuple[Any, str | None]:
        """Return a value that Arrow accepts, and the problem of the original or None."""
        try:
            pa.array([value], self._type)
        except _UNFIT as error:
            fields = value if self._fields else {}
            fitting = self._each_field(fields, lambda _, type_, each: pa.array([each], type_)[0].as_py())
            return fitting if self._fields else None, f"does not have the declared type: {error}"
        return value, None

    def _each_field(self, values: Mapping[str, Any], convert: Callable[[Any, pa.DataType, Any], Any]) -> Any:
        """Return the fields of an object that can be converted."""
        converted = {}
        for name, (type_, decode) in self._fields.items():
            if name in values:
                with suppress(msgspec.DecodeError, *_UNFIT):
                    converted[name] = convert(decode, type_, values[name])
        return converted


def _decoder(type_: pa.DataType) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(json_type("", type_) | None, strict=False).decode


ROWS_PER_BATCH = 5_000
BYTES_PER_BATCH = 32 << 20
"""Maximum size of the decompressed payloads of a batch."""
DECODED = ("format", "payload", "reason", "data")
"""Columns that are decoded from envelopes."""
_FROM_EVENT = {"sent_at": "at"}
"""Columns with another name in `postroom_events`."""
_JSON = (PayloadFormat.JSON, PayloadFormat.PROTOBUF)


@dataclass(frozen=True)
class PayloadRows:
    """Typed rows of messages with their payloads; it is pickled and sent to tasks.

    Arguments:
        schema: Arrow schema of the rows, with columns of `PAYLOADS`.
        topic: a topic, or a prefix followed by `*`; None for all.
        fails_fast: whether a payload with a problem fails the read.

    Raises: InvalidRequest if the column `payload` is declared with a type that JSON lacks.
    """

    log: LogReader
    schema: pa.Schema
    decoder: PayloadDecoder
    topic: str | None = None
    fails_fast: bool = False

    def __post_init__(self) -> None:
        if self._payload_type != pa.string():
            check_document_type("payload", self._payload_type)

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ranges, in the order of positions.

        Raises: InvalidRequest for the first payload with a problem, if `fails_fast`.
        """
        is_decoded = self.fails_fast or not set(DECODED).isdisjoint(self.schema.names)
        needed = ("message_id", "mailbox", "position", "envelope") if is_decoded else ()
        names = [_FROM_EVENT.get(name, name) for name in self.schema.names if name not in DECODED]
        schema = pa.schema([(name, self._event_type(name)) for name in dict.fromkeys([*names, *needed])])
        events = EventRows(self.log, schema, EventFilter((SENT,), self.topic))
        document = None if self._payload_type == pa.string() else DocumentColumn(self._payload_type)
        for batch in events.read(ranges):
            if is_decoded:
                yield from self._decode(batch, document)
            else:
                yield self._row_batch({name: batch[name] for name in batch.schema.names})

    @property
    def _payload_type(self) -> pa.DataType:
        index = self.schema.get_field_index("payload")
        return self.schema.field(index).type if index >= 0 else pa.string()

    def _event_type(self, name: str) -> pa.DataType:
        own = "sent_at" if name == "at" else name
        if own in self.schema.names:
            return self.schema.field(own).type
        return {"position": pa.int64(), "envelope": pa.binary()}.get(name, pa.string())

    def _decode(self, events: pa.RecordBatch, document: DocumentColumn | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of events, in batches of a bounded size."""
        payloads: list[DecodedPayload | None] = []
        size = first = 0
        for row, (mailbox, envelope) in enumerate(zip(events["mailbox"], events["envelope"], strict=True), 1):
            payload = self._payload(mailbox.as_py(), envelope.as_py())
            payloads.append(payload)
            size += len(payload.data) if payload is not None else 0
            if row == events.num_rows or len(payloads) == ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
                yield self._rows(events.slice(first, row - first), payloads, document)
                payloads, size, first = [], 0, row

    def _payload(self, mailbox: str, envelope: bytes) -> DecodedPayload | None:
        try:
            return self.decoder.decode(mailbox, parse_envelope(envelope))
        except InvalidRequest:
            return None

    def _rows(
        self,
        events: pa.RecordBatch,
        payloads: list[DecodedPayload | None],
        document: DocumentColumn | None,
    ) -> pa.RecordBatch:
        reasons = [_reason(payload) for payload in payloads]
        columns = {name: events[name] for name in events.schema.names}
        texts = [payload and payload.text for payload in payloads]
        if document is not None:
            is_json = [payload is not None and payload.format in _JSON for payload in payloads]
            documents = [text if is_ else None for text, is_ in zip(texts, is_json, strict=True)]
            columns["payload"], problems = document.array(documents)
            unfit = [
                problem or (None if is_ or payload is None else f"is {payload.format}, which has no JSON")
                for problem, is_, payload in zip(problems, is_json, payloads, strict=True)
            ]
            reasons = [old or _sentence(new) for old, new in zip(reasons, unfit, strict=True)]
        elif "payload" in self.schema.names:
            columns["payload"] = pa.array(texts, pa.string())
        if self.fails_fast:
            self._check(events, reasons)
        columns["reason"] = pa.array(reasons, pa.string())
        columns["format"] = pa.array([payload and payload.format.value for payload in payloads], pa.string())
        if "data" in self.schema.names:
            columns["data"] = pa.array([payload and payload.data for payload in payloads], pa.binary())
        return self._row_batch(columns)

    def _row_batch(self, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        names = [_FROM_EVENT.get(name, name) for name in self.schema.names]
        return pa.RecordBatch.from_arrays([columns[name] for name in names], schema=self.schema)

    def _check(self, events: pa.RecordBatch, reasons: list[str | None]) -> None:
        for row, reason in enumerate(reasons):
            if reason is not None:
                raise InvalidRequest(
                    f"Message {events['message_id'][row]} at position {events['position'][row]} of mailbox "
                    f"{events['mailbox'][row]}: {reason} Set the option mode=permissive to get this in the "
                    "column reason."
                )


def _reason(payload: DecodedPayload | None) -> str | None:
    if payload is None:
        return "The envelope is not a PrismEnvelope."
    return _sentence("; it ".join(payload.problems))


def _sentence(problem: str | None) -> str | None:
    return f"The payload {problem}." if problem else None
