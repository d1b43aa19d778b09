"""Encryption of stored messages, and decryption of delivered ones, by a mailbox's owner."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from postroom.application.erasure.message_cipher import decrypt, encrypt, read_pseudonym, read_subject
from postroom.application.ports.event_log import Answer
from postroom.application.ports.subject_keys import SubjectKey, SubjectKeys
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import IntegrityFailure, InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Ack, Command, Nack, Send
from postroom.domain.message import MessageSent
from postroom.domain.names import STREAM_BYTES, message_id
from postroom.domain.record import Record
from postroom.domain.redrive.job import Copy
from postroom.domain.subject import SubjectPolicy, find_policy, is_encrypted

ConsumerPart = Literal["result", "traceback"]


def _content_of(command: Command) -> bytes | None:
    """Return the result of an ack, or the traceback of a nack, if it has one."""
    if type(command) is Ack:
        return command.result
    return command.traceback if type(command) is Nack else None


M = TypeVar("M", Send, Copy)
Submit = Callable[[Sequence[Command]], Awaitable[list[Answer]]]

Unreadable = Literal["altered", "erased"]
"""Why a stored message can't be decrypted: its ciphertext was altered, or its key was destroyed."""


class _Plaintext(NamedTuple):
    """The envelope of a message that is to be encrypted, and for whom."""

    envelope: PrismEnvelope
    policy: SubjectPolicy
    subject: str


class MessageEncryption:
    """Encryption of the messages of data subjects, so that destroying a key erases them.

    The owner of a mailbox encrypts, whoever sends: the log, and everything that is derived from it, only ever
    contains ciphertext. Without the key store it stores nothing of a topic that has a policy.

    Arguments:
        keys: of the subjects.
        topics: policies by topic, used until the owner of a mailbox replaces `read_topics`. It also replaces
            `read_records`, which returns the records of a message: its result is encrypted if the message is.
    """

    def __init__(self, keys: SubjectKeys, topics: Mapping[str, SubjectPolicy]) -> None:
        self.keys = keys
        self.read_topics: Callable[[], Mapping[str, SubjectPolicy]] = lambda: topics
        self.read_records: Callable[[bytes], Sequence[Record]] = lambda stream: ()
        self._order = asyncio.Lock()

    @property
    def topics(self) -> Mapping[str, SubjectPolicy]:
        """Return the policies by topic."""
        return self.read_topics()

    def policy(self, topic: str) -> SubjectPolicy | None:
        """Return the policy of a topic, or None if its messages are not encrypted."""
        return find_policy(self.topics, topic)

    async def submit(self, commands: Sequence[Command], submit: Submit) -> list[Answer]:
        """Submit commands with their messages, results and tracebacks encrypted, in the order of the calls.

        Arguments:
            submit: returns an answer for each command.

        Returns: an answer for each command; `Rejected` for a message or result that can't be encrypted.
        Raises: Unavailable when the key store can't be used; then nothing was submitted.
        """
        if not any(
            self._concerns(each) if type(each) is Send else _content_of(each) is not None for each in commands
        ):
            return await submit(commands)
        async with self._order:
            encrypted = await asyncio.to_thread(self._encrypt_commands, commands)
        return await _submit_accepted(encrypted, submit)

    async def wait_until_submitted(self) -> None:
        """Wait until the messages that are being encrypted now are submitted."""
        async with self._order:
            pass

    def encrypt_copy(self, copy: Copy, original: MessageSent) -> Copy:
        """Return the copy of a message encrypted by the policy of its topic, or else of its original's topic.

        Arguments:
            original: as it is stored; the copy of one that is not encrypted may be in the clear.

        Raises: InvalidRequest when there is no policy or no subject, Unavailable when the key store can't be
            used.
        """
        policy = self.policy(copy.topic)
        if policy is None and not is_encrypted(original.headers):
            return copy
        policy = policy or self.policy(original.topic)
        if policy is None:
            raise InvalidRequest(f"No policy encrypts messages on topic {copy.topic}; add one.")
        envelope = parse_envelope(copy.envelope)
        plaintext = _Plaintext(envelope, policy, read_subject(envelope, copy.topic, policy))
        return _encrypt(copy, None, plaintext, self.keys.get_or_create([plaintext.subject]))

    def read_messages(self, messages: Iterable[MessageSent]) -> dict[bytes, MessageSent | Unreadable]:
        """Return messages as they were sent, by stream; those that can't be decrypted with the reason.

        Raises: Unavailable when the key store can't be used, UnknownPseudonym when it is another one.
        """
        results: dict[bytes, MessageSent | Unreadable] = {}
        encrypted: dict[str, list[MessageSent]] = {}
        for sent in messages:
            results[sent.stream] = sent
            if is_encrypted(sent.headers):
                pseudonym = read_pseudonym(sent)
                if pseudonym is None:
                    results[sent.stream] = "altered"
                else:
                    encrypted.setdefault(pseudonym, []).append(sent)
        keys = self.keys.resolve(encrypted) if encrypted else {}
        for pseudonym, those in encrypted.items():
            for sent in those:
                results[sent.stream] = _decrypt(sent, keys[pseudonym])
        return results

    def read_message(self, sent: MessageSent) -> MessageSent | Unreadable:
        """Return a message as it was sent, or why it can't be decrypted; raises as `read_messages`."""
        return self.read_messages([sent])[sent.stream]

    def read_content(self, sent: MessageSent, part: ConsumerPart, content: bytes) -> bytes | Unreadable:
        """Return what a consumer gave with a settlement of a message, or why it can't be decrypted.

        Raises: as `read_messages`.
        """
        if not is_encrypted(sent.headers):
            return content
        pseudonym = read_pseudonym(sent)
        if pseudonym is None:
            return "altered"
        key = self.keys.resolve([pseudonym])[pseudonym]
        if key is None:
            return "erased"
        try:
            content = key.decrypt(part, content)
        except IntegrityFailure:
            return "altered"
        return content[STREAM_BYTES:] if content.startswith(sent.stream) else "altered"

    def _encrypt_commands(self, commands: Sequence[Command]) -> list[Command | Rejected]:
        results: list[Command | Rejected] = list(commands)
        plaintexts: dict[int, tuple[Send, _Plaintext]] = {}
        for index, command in enumerate(commands):
            if type(command) is Send:
                try:
                    plaintext = self._plaintext(command)
                except Rejected as refusal:
                    results[index] = refusal
                    continue
                if plaintext is not None:
                    plaintexts[index] = command, plaintext
            elif isinstance(command, Ack | Nack) and (content := _content_of(command)) is not None:
                results[index] = self._encrypt_content(command, content)
        if plaintexts:
            keys = self.keys.get_or_create({each.subject for _, each in plaintexts.values()})
            for index, (send, plaintext) in plaintexts.items():
                results[index] = _encrypt(send, send.idem_key, plaintext, keys)
        return results

    def _encrypt_content(self, command: Ack | Nack, content: bytes) -> Command | Rejected:
        """Return an ack or nack with its content encrypted if its message is; without it if the key is gone.

        The stream of the message is encrypted with the content: equal ones have different ciphertexts.
        """
        stream = command.receipt.message
        sent = _read_encrypted(self.read_records(stream))
        if sent is None:
            return command
        pseudonym = read_pseudonym(sent)
        if pseudonym is None and type(command) is Ack:
            return InvalidRequest(
                f"Message {message_id(stream)} was altered on disk, so its result can't be encrypted; ack it "
                "without a result."
            )
        key = None if pseudonym is None else self.keys.resolve([pseudonym])[pseudonym]
        if type(command) is Nack:
            encrypted = None if key is None else key.encrypt("traceback", stream + content)
            return msgspec.structs.replace(command, traceback=encrypted)
        if key is None:
            return msgspec.structs.replace(command, result=None, result_type=None)
        return msgspec.structs.replace(command, result=key.encrypt("result", stream + content))

    def _concerns(self, message: Send) -> bool:
        return self.policy(message.topic) is not None or is_encrypted(message.headers)

    def _plaintext(self, message: Send) -> _Plaintext | None:
        """Return the content of a message that is to be encrypted, or None if its topic has no policy."""
        if is_encrypted(message.headers):
            raise _is_encrypted_already(message)
        policy = self.policy(message.topic)
        if policy is None:
            return None
        envelope = parse_envelope(message.envelope)
        return _Plaintext(envelope, policy, read_subject(envelope, message.topic, policy))


async def submit_without_keys(
    commands: Sequence[Command], submit: Submit, read_records: Callable[[bytes], Sequence[Record]]
) -> list[Answer]:
    """Submit commands for an owner without a key store, which refuses some of them.

    It refuses encrypted messages, which nobody could decrypt under other ids, and results of encrypted
    messages, which would be stored in the clear. Tracebacks of encrypted messages are left out.

    Arguments:
        read_records: returns the records of a message.
    """

    def check(command: Command) -> Command | Rejected:
        if type(command) is Send and is_encrypted(command.headers):
            return _is_encrypted_already(command)
        if _content_of(command) is None:
            return command
        assert isinstance(command, Ack | Nack)
        sent = _read_encrypted(read_records(command.receipt.message))
        if sent is None:
            return command
        if type(command) is Nack:
            return msgspec.structs.replace(command, traceback=None)
        return InvalidRequest(
            f"Message {message_id(sent.stream)} is encrypted, and the owner of its mailbox has no key store, "
            "so its result would be stored in the clear; give the owner the key store, or ack without a "
            "result."
        )

    return await _submit_accepted(await asyncio.to_thread(lambda: [*map(check, commands)]), submit)


def _is_encrypted_already(message: Send) -> InvalidRequest:
    return InvalidRequest(
        f"The message on topic {message.topic} is one that Postroom encrypted; send it as it was delivered "
        "by an owner with the key store."
    )


async def _submit_accepted(commands: Sequence[Command | Rejected], submit: Submit) -> list[Answer]:
    """Submit the commands among refusals; return an answer for each, in their order."""
    accepted = [each for each in commands if not isinstance(each, Rejected)]
    answers = iter(await submit(accepted) if accepted else ())
    return [each if isinstance(each, Rejected) else next(answers) for each in commands]


def _read_encrypted(records: Sequence[Record]) -> MessageSent | None:
    """Return the first event of a message if Postroom encrypted it."""
    sent = records[0].event if records else None
    return sent if isinstance(sent, MessageSent) and is_encrypted(sent.headers) else None


def _encrypt(message: M, idem_key: str | None, plaintext: _Plaintext, keys: Mapping[str, SubjectKey]) -> M:
    content = encrypt(
        plaintext.envelope,
        plaintext.policy,
        keys[plaintext.subject],
        stream=message.message,
        headers=message.headers,
        idem_key=idem_key,
    )
    return msgspec.structs.replace(message, **content._asdict())


def _decrypt(sent: MessageSent, key: SubjectKey | None) -> MessageSent | Unreadable:
    if key is None:
        return "erased"
    try:
        return decrypt(sent, key)
    except (IntegrityFailure, InvalidRequest):
        return "altered"
