"""Commands of agents in two steps: a preview with a token, and the change, if the preview still holds."""

import asyncio
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hmac import compare_digest
from secrets import token_bytes
from typing import Annotated, Any, Final, NamedTuple
from uuid import UUID

import msgspec
from blake3 import blake3
from msgspec import Meta

from postroom.adapters.mcp.answers import Answer, answer_value
from postroom.adapters.mcp.settings import Permission
from postroom.adapters.mcp.tools import Call, Tool, check_criteria, describe
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.operations.operation import Operation, arguments_struct
from postroom.application.queries.mailbox_past import to_us
from postroom.application.reports import RedriveReport
from postroom.application.text import from_rfc3339
from postroom.domain.capability.token import KEY_ID_BYTES, SECRET_BYTES, RootKey
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Rejected
from postroom.domain.message import MS
from postroom.domain.redrive.spec import RedriveSpec

LIFETIME_SECONDS: Final = 600
MAX_IDS: Final = 100
MAC_BYTES: Final = 16
MICROSECONDS: Final = 1_000_000
CONTEXT: Final = "postroom 2026-11-30 confirmations of previews by agents"
"""Context of the derivation of keys for tokens of previews."""
Confirm = Annotated[
    str, Meta(min_length=1, max_length=255, description="`confirm` of the preview with the same arguments.")
]
_encode = msgspec.json.Encoder(order="deterministic").encode


class StalePreview(Rejected):
    """The changes of a command differ from its preview."""

    code = "E_STALE_PREVIEW"
    status = 409


class Preview(NamedTuple):
    """What a command would change.

    Arguments:
        shown: the preview for the caller.
        selection: values that must be the same when the command is confirmed.
        until: end of the dead-letterings that a redrive job selects, ms since 1970 UTC; 0 for other commands.
    """

    shown: Any
    selection: Any
    until: int = 0


class Token(NamedTuple):
    """The token of a preview.

    Arguments:
        expires: seconds since 1970 UTC.
        until: see `Preview`.
        arguments: authentication code of the caller, the command and its arguments.
        selection: authentication code of the selection.
    """

    expires: int
    until: int
    arguments: bytes
    selection: bytes

    def encode(self) -> str:
        """Return the token as text."""
        numbers = self.expires.to_bytes(8) + self.until.to_bytes(8)
        return urlsafe_b64encode(numbers + self.arguments + self.selection).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "Token":
        """Return the token of a text; raise InvalidRequest for other text."""
        try:
            data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            data = b""
        if len(data) != 16 + 2 * MAC_BYTES:
            raise _not_a_preview()
        numbers = int.from_bytes(data[:8]), int.from_bytes(data[8:16])
        return cls(*numbers, data[16 : 16 + MAC_BYTES], data[16 + MAC_BYTES :])


class Confirmations:
    """Maker and checker of the tokens of previews; nothing is stored.

    A token is signed with the newest root key of the store, so every process that has the keys accepts it.
    For a store without keys, the process uses a key of its own.

    Arguments:
        clock: seconds since 1970 UTC.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._own = RootKey(token_bytes(KEY_ID_BYTES), token_bytes(SECRET_BYTES), 0)
        self._clock = clock

    async def issue(self, call: Call, command: str, arguments: Any, preview: Preview) -> Token:
        """Return the token of a preview."""
        keys = await self._read_keys(call)
        signature = _Signature(keys[0])
        expires = int(self._clock()) + LIFETIME_SECONDS
        code = signature.of(*_caller(call, keys), command, arguments, expires, preview.until)
        return Token(expires, preview.until, code, signature.of(code.hex(), preview.selection))

    async def check(self, call: Call, command: str, arguments: Any, text: str) -> "Confirmed":
        """Return the token of a preview by this caller with these arguments.

        Raises: InvalidRequest for any other token; StalePreview for an expired one.
        """
        token, keys = Token.decode(text), await self._read_keys(call)
        signed = (*_caller(call, keys), command, arguments, token.expires, token.until)
        for signature in map(_Signature, keys):
            if compare_digest(signature.of(*signed), token.arguments):
                break
        else:
            raise _not_a_preview()
        if token.expires < self._clock():
            raise StalePreview("The preview is older than 10 minutes; preview the command again.")
        return Confirmed(token, signature)

    async def _read_keys(self, call: Call) -> list[RootKey]:
        """Return the valid keys, newest first."""
        ring, now = call.sources.keys, int(self._clock() * MICROSECONDS)
        keys = await asyncio.to_thread(ring.root_keys) if ring is not None else ()
        valid = [each for each in keys if each.retire_at is None or each.retire_at > now]
        return sorted(valid, key=lambda key: key.created_at, reverse=True) or [self._own]


class _Signature:
    """Maker of authentication codes with a key that is derived from a root key."""

    def __init__(self, key: RootKey) -> None:
        self._key = blake3(key.secret, derive_key_context=CONTEXT).digest()

    def of(self, *values: Any) -> bytes:
        """Return the code of some values."""
        return blake3(_encode(values), key=self._key).digest(MAC_BYTES)


class Confirmed(NamedTuple):
    """Token of a preview that its caller has confirmed."""

    token: Token
    signature: _Signature

    def check_selection(self, preview: Preview) -> None:
        """Raise StalePreview unless a new preview selects the same."""
        code = self.signature.of(self.token.arguments.hex(), preview.selection)
        if not compare_digest(code, self.token.selection):
            raise StalePreview(
                "What the command would change is not what its preview showed, so nothing was changed; "
                "preview it again."
            )


def _not_a_preview() -> InvalidRequest:
    return InvalidRequest(
        "This confirm belongs to no preview of this command with these arguments; preview it, and use its "
        "confirm."
    )


def _caller(call: Call, keys: Sequence[RootKey]) -> tuple[str, str]:
    """Return the mailbox and its caller: a capability of the store, or the user of a process.

    The user has another capability in each process, which no key of the store has signed.
    """
    access = call.session.grant.access
    if access is None:
        return call.sources.mailbox, ""
    is_issued = any(each.id == access.key_id for each in keys)
    return call.sources.mailbox, access.nonce.hex() if is_issued else access.principal


class Command(NamedTuple):
    """A command.

    Arguments:
        permission: name under which settings allow it.
        preview: returns what the command would change, or raises the error with which it would be refused.
            Its last argument is the `until` of an earlier preview, or 0.
        left_out: names of the operation's arguments that the tool does not have.
    """

    operation: Operation
    permission: Permission
    preview: Callable[[Call, Mapping[str, Any], int], Awaitable[Preview]]
    left_out: tuple[str, ...] = ()


def command_tools() -> list[Tool]:
    """Return the tools of all commands, each after its preview."""
    confirmations = Confirmations()
    return [tool for command in _COMMANDS for tool in _tools(command, confirmations)]


def _tools(command: Command, confirmations: Confirmations) -> list[Tool]:
    operation = command.operation
    sent = [each for each in operation.parameters if each.is_sent and each.name not in command.left_out]
    request = arguments_struct(operation, sent)
    confirmed = msgspec.defstruct(
        request.__name__, [("confirm", Confirm)], bases=(request,), kw_only=True, frozen=True,
        forbid_unknown_fields=True,
    )  # fmt: skip

    def values_of(asked: Any) -> dict[str, Any]:
        return {each.name: each.check(getattr(asked, each.sent_as)) for each in sent}

    async def preview(call: Call, asked: Any) -> Answer:
        values = values_of(asked)
        shown = await command.preview(call, values, 0)
        token = await confirmations.issue(call, operation.name, values, shown)
        return answer_value(shown.shown, call.sources.mask, confirm=token.encode())

    async def run(call: Call, asked: Any) -> Answer:
        values = values_of(asked)
        confirmed = await confirmations.check(call, operation.name, values, asked.confirm)
        token = confirmed.token
        confirmed.check_selection(await command.preview(call, values, token.until))
        if operation.name == "start_redrive":
            values["spec"] = _until(values["spec"], token.until)
            # Confirming twice starts one job.
            values["job_id"] = str(UUID(bytes=token.selection, version=4))
        result = await operation.ask(call.session.mailbox, values)
        return answer_value({"result": result}, call.sources.mask)

    text = describe(operation)
    return [
        Tool(
            f"preview_{operation.name}",
            operation.right,
            f"Return what `{operation.name}` would change, and its `confirm`. Nothing is changed.",
            request,
            preview,
            command.permission,
        ),
        Tool(
            operation.name,
            operation.right,
            f"{text}\n\nIt needs the `confirm` of `preview_{operation.name}` with the same arguments, and "
            "changes nothing if what it would change is not what the preview showed.",
            confirmed,
            run,
            command.permission,
            changes=True,
        ),
    ]


async def _preview_redrive(call: Call, values: Mapping[str, Any], until: int) -> Preview:
    """Return the dead letters that a job would redrive: those until the preview, and none that come later."""
    spec: RedriveSpec = values["spec"]
    if spec.action != "redrive":
        raise Forbidden(f"Agents start jobs that redrive, not jobs that {spec.action}.")
    check_criteria(call, spec.filter())
    if not until and spec.dead_until is None:
        topic = next((each for each in spec.topics if "*" not in each), None)
        backlog = await call.session.mailbox.get_backlog(topic)
        until = to_us(from_rfc3339(backlog.as_of)) // MS
    preview = await call.session.mailbox.preview_redrive(_until(spec, until))
    groups = [[each.topic, each.reason, each.fingerprint, each.count] for each in preview.groups]
    return Preview(preview, [preview.matched, preview.digest, groups], until)


def _until(spec: RedriveSpec, until: int) -> RedriveSpec:
    return msgspec.structs.replace(spec, dead_until=until) if until else spec


async def _preview_change(call: Call, values: Mapping[str, Any], until: int) -> Preview:
    report: RedriveReport = await call.session.mailbox.get_redrive(values["job_id"])
    return Preview({"action": values["action"], "job": report}, report.status)


async def _preview_cancel(call: Call, values: Mapping[str, Any], until: int) -> Preview:
    if len(values["ids"]) > MAX_IDS:
        raise InvalidRequest(f"Agents cancel up to {MAX_IDS} messages at a time; name fewer.")
    states = [await _state(call, each) for each in values["ids"]]
    return Preview({"messages": states}, states)


async def _state(call: Call, id_: str) -> dict[str, str]:
    try:
        detail = await call.session.read_headers(id_)
    except (Forbidden, NotFound):
        return {"message_id": id_, "topic": "", "status": "unknown"}
    status = "waiting" if detail.status in ("ready", "delayed") else detail.status
    return {"message_id": id_, "topic": detail.topic, "status": status}


async def _preview_pause(call: Call, values: Mapping[str, Any], until: int) -> Preview:
    topic = values["topic"]
    backlog = await call.session.mailbox.get_backlog(topic)
    is_paused = topic in backlog.paused_topics
    names = ("ready", "in_flight", "delayed", "dead")
    counts = {name: sum(getattr(each, name) for each in backlog.shards) for name in names}
    return Preview({"topic": topic, "is_paused": is_paused, **counts}, is_paused)


_COMMANDS: Final = (
    Command(OPERATIONS["start_redrive"], "redrive", _preview_redrive, ("job_id",)),
    Command(OPERATIONS["change_redrive"], "redrive", _preview_change),
    Command(OPERATIONS["cancel_messages"], "cancel", _preview_cancel),
    Command(OPERATIONS["pause_topic"], "pause", _preview_pause),
    Command(OPERATIONS["resume_topic"], "pause", _preview_pause),
)
