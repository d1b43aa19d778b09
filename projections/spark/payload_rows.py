"""Rows of `postroom_payloads`: sent messages with their decoded payloads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest
from postroom.projections.log_extent import Range
from postroom.projections.models.messages import SENT
from postroom.projections.ports.log_reader import LogReader
from postroom.projections.ports.payload_decoder import PayloadDecoder
from postroom.projections.spark.event_rows import EventFilter, EventRows
from postroom.projections.spark.json_types import DocumentColumn, check_document_type

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
