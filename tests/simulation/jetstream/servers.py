"""A model of NATS servers with the streams of a store: what they answer, lose, and tell too late."""

import base64
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from random import Random
from typing import Any, NamedTuple

API = "$JS.API."
NO_MESSAGE = {"code": 404, "err_code": 10037, "description": "no message found"}
WRONG_LAST_SEQUENCE = {"code": 400, "err_code": 10071, "description": "wrong last sequence"}
LAG = 4
"""Messages by which a replica is at most behind its leader."""


class Answer(NamedTuple):
    """A message to a client; `headers` has the lines after the first one."""

    headers: Mapping[str, str]
    data: bytes


class Message(NamedTuple):
    """A message of a stream."""

    sequence: int
    subject: str
    data: bytes


class Stream:
    """The messages of a stream that most servers have, and how many of them survive a power cut.

    Arguments:
        name: its subjects begin with it.
        per_subject: messages of a subject that are kept; 0 for all.
    """

    def __init__(self, name: str, per_subject: int = 0) -> None:
        self.name = name
        self.messages: list[Message] = []
        self.last = 0
        self.synced = 0
        self._per_subject = per_subject

    def matching(self, pattern: str, count: int | None = None) -> Iterable[Message]:
        """Return the messages whose subject matches a pattern, of the first `count` messages."""
        pattern = pattern.replace(">", "*")
        return [each for each in self.messages[:count] if fnmatchcase(each.subject, pattern)]

    def store(self, subject: str, data: bytes, expected: int | None) -> int | None:
        """Store a message, and return its sequence; None if the subject has another last message."""
        earlier = [each for each in self.messages if each.subject == subject]
        if expected is not None and expected != (earlier[-1].sequence if earlier else 0):
            return None
        self.last += 1
        self.messages.append(Message(self.last, subject, data))
        if self._per_subject:
            for each in earlier:
                self.messages.remove(each)
        return self.last

    def remove(self, pattern: str, before: int | None) -> int:
        """Remove the messages of matching subjects below a sequence, or all; return how many."""
        gone = {*(each for each in self.matching(pattern) if before is None or each.sequence < before)}
        self.messages = [each for each in self.messages if each not in gone]
        return len(gone)

    def cut_power(self) -> None:
        """Lose what was not synced."""
        self.messages = [each for each in self.messages if each.sequence <= self.synced]
        self.last = self.synced


class Servers:
    """Servers of one store.

    Attributes:
        is_synced: whether they sync a message before they confirm it.
        lag, loss: probabilities that a replica that answers a read is behind, and that a message of a page is
            lost on its way.
    """

    def __init__(self, random: Random, name: str) -> None:
        self.is_synced = True
        self.lag = self.loss = 0.0
        self.streams = {name: Stream(name), f"{name}_STATE": Stream(f"{name}_STATE", per_subject=1)}
        self._random = random

    def cut_power(self) -> None:
        """Cut the power of all servers, and start them again."""
        for stream in self.streams.values():
            stream.cut_power()

    def handle(self, subject: str, headers: Mapping[str, str], data: bytes) -> list[Answer]:
        """Do what a request says, as the leader of its stream; return the answers."""
        if not subject.startswith(API):
            return [self._publish(subject, headers, data)]
        call, _, name = subject.removeprefix(API).rpartition(".")
        request: dict[str, Any] = json.loads(data or b"{}")
        stream = self.streams[name]
        match call:
            case "DIRECT.GET" if "batch" in request:
                return self._read_page(stream, request)
            case "DIRECT.GET":
                message = self._find(stream, request, self._known_to_replica(stream))
                return [Answer({"Status": "404"}, b"") if message is None else _direct(message)]
            case "STREAM.MSG.GET":
                message = self._find(stream, request, None)
                return [_json({"error": NO_MESSAGE} if message is None else {"message": _encoded(message)})]
            case "STREAM.INFO":
                subjects = {each.subject: 1 for each in stream.matching(request.get("subjects_filter", ">"))}
                names = sorted(subjects)[request.get("offset", 0) :]
                state = {"bytes": 0, "subjects": dict.fromkeys(names, 1)}
                return [_json({"state": state, "total": len(subjects)})]
            case "STREAM.PURGE":
                count = stream.remove(request["filter"], request.get("seq"))
                return [_json({"success": True, "purged": count})]
        raise AssertionError(f"the model does not know {subject}")

    def _publish(self, subject: str, headers: Mapping[str, str], data: bytes) -> Answer:
        stream = self.streams[subject.partition(".")[0]]
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        sequence = stream.store(subject, data, None if expected is None else int(expected))
        if sequence is None:
            return _json({"error": WRONG_LAST_SEQUENCE})
        if self.is_synced or self._random.random() < 0.1:
            stream.synced = sequence
        return _json({"stream": stream.name, "seq": sequence})

    def _known_to_replica(self, stream: Stream) -> int | None:
        """Return how many messages the replica has that answers; None for all."""
        if self._random.random() >= self.lag:
            return None
        return max(0, len(stream.messages) - self._random.randint(1, LAG))

    def _find(self, stream: Stream, request: Mapping[str, Any], count: int | None) -> Message | None:
        if "last_by_subj" in request:
            return next(reversed([*stream.matching(request["last_by_subj"], count)]), None)
        messages = stream.matching(request.get("next_by_subj", ">"), count)
        found = next((each for each in messages if each.sequence >= request["seq"]), None)
        if "next_by_subj" not in request and found is not None and found.sequence != request["seq"]:
            return None
        return found

    def _read_page(self, stream: Stream, request: Mapping[str, Any]) -> list[Answer]:
        messages = stream.matching(request["next_by_subj"], self._known_to_replica(stream))
        page = [each for each in messages if each.sequence >= request["seq"]][: request["batch"]]
        answers = [_direct(each) for each in page if self._random.random() >= self.loss]
        return [*answers, Answer({"Status": "204"}, b"")]


def _direct(message: Message) -> Answer:
    return Answer({"Nats-Subject": message.subject, "Nats-Sequence": str(message.sequence)}, message.data)


def _encoded(message: Message) -> dict[str, Any]:
    data = base64.b64encode(message.data).decode()
    return {"subject": message.subject, "seq": message.sequence, "data": data}


def _json(answer: Mapping[str, Any]) -> Answer:
    return Answer({}, json.dumps(answer).encode())
