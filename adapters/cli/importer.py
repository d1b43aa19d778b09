"""`postroom import`: import NDJSON files into a mailbox, idempotently."""

import asyncio
import gzip
import io
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from postroom.adapters.cli.session import ARCHIVE_MAILBOX, MEMORY, Session
from postroom.adapters.cli.values import WrongUsage, parse_pairs
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, Rejected, Saturated, WrongMode

Headers = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=PATH",
        help="Header from a field, such as principal=sender.login; may be repeated. principal, "
        "correlation_id, trace_id, span_id and content_type are standard, others are custom headers.",
    ),
]
Key = Annotated[str | None, Option(metavar="PATH", help="Field of the sticky key.")]
Time = Annotated[
    str | None,
    Option(
        "--time", metavar="PATH", help="Field of the publish time: RFC 3339, or s, ms, µs, ns since 1970."
    ),
]
Id = Annotated[
    str | None,
    Option(
        "--id",
        metavar="PATH",
        help="Field of the message id; default: the publisher's, or derived from place and content.",
    ),
]


if TYPE_CHECKING:
    from postroom.adapters.compose.connect import SharedMailbox
    from postroom.application.ingest.file_import import RecordMapping
    from postroom.application.messages import Sent


BATCH = 500
LINES_PER_TURN = 50
"""Lines read between yields to the event loop, which stores the previous batch in the meantime."""
SATURATED_TRIES = 5
MAX_LINE_BYTES = 16 << 20
MAX_NOTES = 20
BOM = b"\xef\xbb\xbf"


async def import_file(
    session: Session,
    file: Annotated[str, Argument(metavar="FILE", help="NDJSON, optionally gzipped; - reads stdin.")],
    topic: Annotated[
        str | None,
        Option(
            metavar="TEMPLATE",
            help="Read lines as any JSON and send them to this topic, such as github.{event}.{action}; "
            "segments whose field is null or missing are left out.",
        ),
    ] = None,
    header: Headers = None,
    key: Key = None,
    time_: Time = None,
    id_: Id = None,
    deliver: Annotated[
        bool, Option("--deliver", help="Queue the messages for delivery instead of archiving them.")
    ] = False,
    on_error: Annotated[
        str, Option(metavar="fail|skip", help="Stop at a line that can't be imported, or skip it.")
    ] = "fail",
    validation: Annotated[
        str, Option(metavar="strict|warn|disabled", help="How strictly envelopes are validated.")
    ] = "strict",
) -> None:
    """Import messages from a file; importing a file again adds only messages that are missing.

    A line is a CloudEvent, a PrismEnvelope in base64 or, with --topic, any JSON. The messages are archived in
    archive@local or the mailbox of --mailbox: stored and searchable, but not delivered unless --deliver is
    set. With the store memory: it is a dry run.
    """
    _check_choice("--on-error", on_error, ("fail", "skip"))
    _check_choice("--validation", validation, ("strict", "warn", "disabled"))
    mapping = record_mapping(topic, header or [], key, time_, id_)
    mailbox = session.settings.mailbox or (session.mailbox if deliver else ARCHIVE_MAILBOX)
    async with _use(session, mailbox, deliver) as postroom:
        run = _Import(postroom, mapping, _name(file), on_error == "skip", validation)
        with (
            _open_source(file) as source,
            session.out.progress(f"Importing {_name(file)}", source.size) as advance,
        ):
            await run(source, advance)
    _report(session, run, mailbox)


class _Source:
    """Lines of a file, gzipped or not, and the number of bytes read."""

    def __init__(self, binary_file: io.BufferedReader, name: str, size: int | None) -> None:
        self.size = size
        self._raw = binary_file
        self._name = name
        is_gzipped = binary_file.peek(2)[:2] == b"\x1f\x8b"
        self._lines = gzip.GzipFile(fileobj=binary_file) if is_gzipped else binary_file

    def read(self) -> int:
        """Return the number of bytes read from the file."""
        return self._raw.tell() if self.size is not None else 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield line numbers and lines without their line feeds, except blank lines."""
        number = 0
        try:
            while line := self._lines.readline(MAX_LINE_BYTES):
                number += 1
                if number == 1:
                    line = line.removeprefix(BOM)
                if len(line) == MAX_LINE_BYTES:
                    raise InvalidRequest(f"{self._name}, line {number}: longer than {MAX_LINE_BYTES} bytes.")
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                if line.strip():
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidRequest(f"{self._name} can't be read after line {number}: {error}.") from error


class _Import:
    """Import of one file, with its counts."""

    def __init__(
        self,
        postroom: "SharedMailbox",
        mapping: "RecordMapping | None",
        name: str,
        skip: bool,
        validation: str,
    ) -> None:
        self._postroom = postroom
        self._mapping = mapping
        self._name = name
        self._skip = skip
        self._validation = validation
        self._batch: list[tuple[int, Any]] = []
        self._send_task: asyncio.Task[None] | None = None
        self.read = self.stored = self.duplicates = 0
        self.skipped: list[tuple[int, str]] = []
        self.problems: list[tuple[int, str]] = []
        self.seconds = 0.0

    async def __call__(self, source: _Source, advance: Callable[[float, str], None]) -> None:
        """Import all lines; those before an error are stored when it is raised."""
        from postroom.application.ingest.broker_access import split_documents
        from postroom.application.ingest.file_import import read_record

        start = time.monotonic()
        lines = iter(source) if self._mapping is not None else split_documents(source)
        while True:
            try:
                number, line = next(lines, (0, b""))
            except InvalidRequest:
                await self._finish()
                raise
            if not number:
                break
            self.read += 1
            try:
                record = read_record(line, number, self._mapping)
            except InvalidRequest as error:
                await self._finish()
                self._refuse(number, error)
                continue
            if len(self._batch) >= BATCH or (self._batch and type(record) is not type(self._batch[0][1])):
                await self._flush()
                advance(source.read(), f"{self.read:,} lines")
            self._batch.append((number, record))
            if self.read % LINES_PER_TURN == 0:
                await asyncio.sleep(0)
        await self._finish()
        self.seconds = time.monotonic() - start

    async def _flush(self) -> None:
        """Start sending the collected batch when the previous one is stored."""
        if self._send_task is not None:
            await self._send_task
        batch, self._batch = self._batch, []
        self._send_task = asyncio.create_task(self._store(batch))

    async def _finish(self) -> None:
        """Store the collected lines and wait until they are durable."""
        await self._flush()
        await self._flush()

    async def _store(self, batch: list[tuple[int, Any]]) -> None:
        """Send a batch; retry messages refused by a saturated mailbox, a few times."""
        for remaining in reversed(range(SATURATED_TRIES)):
            if not batch:
                return
            answers = await self._send(batch)
            saturated: list[tuple[tuple[int, Any], Saturated]] = []
            for item, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Saturated):
                    saturated.append((item, answer))
                elif isinstance(answer, Rejected):
                    self._refuse(item[0], answer)
                else:
                    self.stored += not answer.duplicate
                    self.duplicates += answer.duplicate
            batch = [item for item, _ in saturated]
            if batch:
                error = saturated[0][1]
                if not remaining:
                    where = f"{self._name}, line {batch[0][0]}"
                    raise Saturated(f"{where}: {error} {_RETRY_HINT}", error.retry_after_ms)
                await asyncio.sleep(error.retry_after_ms / 1_000)

    async def _send(self, batch: list[tuple[int, Any]]) -> "list[Sent | Rejected]":
        records = [record for _, record in batch]
        if not isinstance(records[0], bytes):
            return await self._postroom.send_batch(records)
        from postroom.domain.envelope.validation import ValidationMode

        problems: list[tuple[int, str]] = []
        answers = await self._postroom.send_envelopes(
            records,
            validation=ValidationMode(self._validation),
            on_problem=lambda index, problem: problems.append((index, problem.message)),
        )
        self.problems += [
            (batch[index][0], message)
            for index, message in problems
            if not isinstance(answers[index], Rejected)
        ]
        return answers

    def _refuse(self, number: int, error: Rejected) -> None:
        if self._skip:
            self.skipped.append((number, str(error)))
            return
        raise type(error)(f"{self._name}, line {number}: {error} {_RETRY_HINT} Or add --on-error skip.")


_RETRY_HINT = (
    "All lines before it are stored; correct it and import the file again, which adds only the missing lines."
)


@asynccontextmanager
async def _use(session: Session, mailbox: str, deliver: bool) -> AsyncIterator["SharedMailbox"]:
    try:
        async with session.use(mailbox, create=True, mode="queue" if deliver else "archive") as postroom:
            yield postroom
    except WrongMode as error:
        if deliver:
            raise InvalidRequest(
                f"Mailbox {mailbox} is an archive, which delivers no messages; leave out --deliver."
            ) from error
        raise InvalidRequest(
            f"Mailbox {mailbox} is a queue; add --deliver to queue the messages, or name an archive with "
            "--mailbox."
        ) from error


@contextmanager
def _open_source(file: str) -> Iterator[_Source]:
    if file == "-":
        yield _Source(cast(io.BufferedReader, sys.stdin.buffer), "stdin", None)
        return
    try:
        binary_file = open(file, "rb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise InvalidRequest(f"The file {file} can't be read: {error.strerror}.") from error
    with binary_file:
        binary_file.seek(0, io.SEEK_END)
        size = binary_file.tell()
        binary_file.seek(0)
        yield _Source(binary_file, file, size)


def _report(session: Session, run: _Import, mailbox: str) -> None:
    rate = round(run.read / run.seconds) if run.seconds else 0
    if session.out.as_json:
        session.out.json(
            {
                "mailbox": mailbox,
                "read": run.read,
                "stored": run.stored,
                "duplicates": run.duplicates,
                "skipped": [{"line": number, "reason": reason} for number, reason in run.skipped],
                "problems": [{"line": number, "problem": problem} for number, problem in run.problems],
                "seconds": round(run.seconds, 3),
                "lines_per_second": rate,
            }
        )
        return
    notes = [f"line {number}: {reason}" for number, reason in run.skipped]
    notes += [f"line {number} is stored, with a problem: {problem}" for number, problem in run.problems]
    for note in notes[:MAX_NOTES]:
        session.out.note(note)
    if len(notes) > MAX_NOTES:
        session.out.note(f"... and {len(notes) - MAX_NOTES:,} more; see all with --json.")
    where = "memory: (dry run)" if session.store == MEMORY else mailbox
    session.out.line(
        f"{pluralize(run.read, 'line')} read, {run.stored:,} stored in {where}, "
        f"{pluralize(run.duplicates, 'duplicate')}, "
        f"{len(run.skipped):,} skipped; {rate:,} lines/s"
    )


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise WrongUsage(f"Unknown {option} {value!r}; expected one of {', '.join(choices)}.")


def _name(file: str) -> str:
    return "stdin" if file == "-" else file


def record_mapping(
    topic: str | None, headers: list[str], key: str | None, time: str | None, id_: str | None
) -> "RecordMapping | None":
    """Return the mapping of the options, or None without a topic, which all others require."""
    from postroom.application.ingest.file_import import RecordMapping, TopicTemplate, parse_path

    if topic is None:
        if headers or key or time or id_:
            raise WrongUsage("--header, --key, --time and --id require --topic.")
        return None
    return RecordMapping(
        topic=TopicTemplate(topic),
        headers={name: parse_path(path) for name, path in parse_pairs(headers, "--header").items()},
        key=parse_path(key) if key else None,
        time=parse_path(time) if time else None,
        id=parse_path(id_) if id_ else None,
    )
