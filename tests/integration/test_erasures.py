"""Erasures: the key is gone, the messages are unreadable everywhere, and the records prove it."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from postroom.adapters.compose import OwnerSettings, open_mailbox
from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.erasures import Erasures
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_master_key
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.subject_keys.master_key import DataKey, LocalMasterKey
from postroom.adapters.subject_keys.memory import FileErasureLog
from postroom.adapters.subject_keys.sqlite import SqliteSubjectKeys
from postroom.application.erasure.erase_subject import ErasureRecord, SubjectMessages
from postroom.application.mailbox.administer import EraseMessages
from postroom.application.messages import NewMessage
from postroom.application.queries.find_subject import CountEncrypted
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound, StaleReceipt, Unavailable
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Record
from postroom.domain.settings import SettingsChanges
from tests.conformance.subject_keys import NOW
from tests.support.erasure import keys_of, new_erasure
from tests.support.waiting import within

MAILBOXES = ["acme@one", "acme@two"]


class Scene:
    """A store with messages of two subjects in every state, in two mailboxes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secrets").mkdir()
        self.settings = new_erasure(folder / "secrets")
        self.store = str(folder / "store.db")
        self.records = Path(str(self.settings.validate().records))

    def erasures(self) -> Erasures:
        return Erasures(self.store, MAILBOXES, self.settings, OwnerSettings(erasure=self.settings))

    def erase(self, subject: str) -> ErasureRecord:
        erasures = self.erasures()
        return asyncio.run(erasures.erase(erasures.preview(subject).subject))

    def complete(self) -> list[ErasureRecord]:
        erasures = self.erasures()
        return [asyncio.run(erasures.erase(each)) for each in erasures.list_pending()]

    async def fill(self) -> None:
        policy = TopicPolicy(max_attempts=1)
        for mailbox in MAILBOXES:
            async with open_mailbox(
                self.store, mailbox, erasure=self.settings, default_policy=policy, durability="relaxed"
            ) as opened:
                await opened.send_batch([_message(name, f"acked {name}") for name in ("alice", "bob")])
                await opened.ack_messages([each.receipt for each in await opened.receive_messages("orders")])
                await opened.send_batch([_message(name, f"dead {name}") for name in ("alice", "bob")])
                await opened.nack_messages([each.receipt for each in await opened.receive_messages("orders")])
                await opened.send_batch([_message(name, f"ready {name}") for name in ("alice", "bob")] * 2)

    async def payloads(self, mailbox: str = MAILBOXES[0]) -> list[str]:
        """Return what is delivered, and then ready again."""
        async with open_mailbox(self.store, mailbox, erasure=self.settings) as opened:
            return [
                str(each.payload and each.payload.decode()) for each in await opened.peek_messages("orders")
            ]


def _message(name: str, payload: str) -> NewMessage:
    return NewMessage(topic="orders", payload=payload.encode(), principal=name)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    asyncio.run(scene.fill())
    return scene


def test_an_erasure_reaches_every_message_of_its_subject_and_no_other(scene: Scene) -> None:
    preview = scene.erasures().preview("alice")
    counts = [("dead", 1), ("ready", 2), ("acked", 1)]
    assert sorted(preview.messages, key=repr) == sorted(
        (
            SubjectMessages(mailbox, "orders", status, count)
            for mailbox in MAILBOXES
            for status, count in counts
        ),
        key=repr,
    )
    assert preview.plaintext == 0
    assert not scene.records.exists()  # a preview changes nothing
    record = scene.erase("alice")
    assert (record.pseudonym, record.removed) == (preview.subject.pseudonym, 6)
    assert sum(each.messages for each in record.messages) == 8
    assert {each.status for each in record.messages} == {"acked", "expired"}
    assert asyncio.run(scene.payloads()) == ["ready bob", "ready bob"]
    verified = scene.erasures().verify()
    assert (verified.records, verified.ends, verified.ends_in_logs) == (1, 2, 2)
    assert (verified.encrypted, verified.erased) == (16, 8)
    for mailbox in MAILBOXES:
        with read_mailbox(scene.store, mailbox, erasure=scene.settings) as reader:
            assert reader.verify_log().messages == 8
    with pytest.raises(NotFound, match="no subject of this name"):
        scene.erasures().preview("alice")


def test_an_erasure_and_a_verification_read_each_log_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    read = SqliteEventLog.read

    def record_start(self: SqliteEventLog, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        starts.append(after)
        return read(self, after, limit)

    monkeypatch.setattr(SqliteEventLog, "read", record_start)
    erasures = scene.erasures()
    record = asyncio.run(erasures.erase(erasures.preview("alice").subject))
    assert sum(each.messages for each in record.messages) == 8
    assert starts.count(0) == len(MAILBOXES)
    starts.clear()
    count = CountEncrypted()
    for mailbox in MAILBOXES:
        with read_mailbox(scene.store, mailbox) as reader:
            reader.verify_log(observe=count.add)
    verified = scene.erasures().verify(count)
    assert starts == []
    assert (verified.encrypted, verified.erased) == (16, 8)


def test_a_restored_store_is_erased_and_a_restored_key_store_is_reported(
    scene: Scene, tmp_path: Path
) -> None:
    shutil.copy(scene.store, tmp_path / "backup.db")
    shutil.copy(scene.settings.keys, tmp_path / "keys-backup.db")
    scene.erase("alice")
    shutil.copy(tmp_path / "backup.db", scene.store)
    assert asyncio.run(scene.payloads()) == ["None", "ready bob", "None", "ready bob"]
    assert scene.erasures().verify().ends_in_logs == 0
    shutil.copy(tmp_path / "keys-backup.db", scene.settings.keys)
    with pytest.raises(IntegrityFailure, match="erase --pending"):
        scene.erasures().verify()
    (record,) = scene.complete()
    assert scene.erasures().verify().records == 1
    assert record.removed == 6
    assert asyncio.run(scene.payloads()) == ["ready bob", "ready bob"]


STEPS: list[tuple[type, str]] = [
    (SqliteSubjectKeys, "destroy"),
    (EraseMessages, "__call__"),
    (FileErasureLog, "append"),
    (SqliteSubjectKeys, "mark_recorded"),
]


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{each.__name__}-{name}" for each, name in STEPS])
def test_an_erasure_killed_at_any_step_is_completed_by_the_next_run(
    scene: Scene, owner: type, name: str, is_after: bool
) -> None:
    process = os.fork()
    if process == 0:  # dies by its own signal
        _kill_at(owner, name, is_after)
        scene.erase("alice")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    pseudonyms = [each.pseudonym for each in scene.erasures().list_pending()]
    is_destroyed = (owner, name) != STEPS[0] or is_after
    is_completed = (owner, name) == STEPS[-1] and is_after
    assert len(pseudonyms) == (is_destroyed and not is_completed)
    if pseudonyms:
        assert asyncio.run(scene.payloads())[-1:] == ["ready bob"]  # from the first step on
        assert scene.erase("alice").pseudonym == pseudonyms[0]  # by name, or as pending
    elif not is_completed:
        scene.erase("alice")
    assert scene.complete() == []
    verified = scene.erasures().verify()
    assert (verified.records, verified.erased) == (1, 8)
    for mailbox in MAILBOXES:
        assert asyncio.run(scene.payloads(mailbox)) == ["ready bob", "ready bob"]


def _kill_at(owner: type, name: str, is_after: bool) -> None:
    step: Callable[..., Any] = getattr(owner, name)

    def kill(*arguments: Any) -> None:
        if is_after:
            step(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    async def kill_async(*arguments: Any) -> None:
        if is_after:
            await step(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill_async if asyncio.iscoroutinefunction(step) else kill)


def test_a_record_that_a_crash_left_incomplete_is_written_again(scene: Scene) -> None:
    scene.erase("bob")
    scene.records.write_bytes(scene.records.read_bytes() + b'{"pseudonym":"subj')
    scene.erase("alice")
    assert scene.erasures().verify().records == 2


def test_every_change_of_the_records_is_detected(scene: Scene) -> None:
    for name in ("alice", "bob"):
        scene.erase(name)
    asyncio.run(scene.fill())
    scene.erase("bob")
    lines = scene.records.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    forged, last = (msgspec.json.decode(each, type=ErasureRecord) for each in lines[1:])
    other_key = LocalMasterKey(bytes(32))
    other_signer = msgspec.structs.replace(last, public_key=other_key.public_key.hex()).sign(other_key)
    altered = [
        [lines[0], lines[1].replace(b'"removed":', b'"removed":1'), lines[2]],
        [lines[0], msgspec.structs.replace(forged, removed=0).encode() + b"\n", lines[2]],
        [lines[0], msgspec.structs.replace(forged, signature="zz").encode() + b"\n", lines[2]],
        [*lines[:2], msgspec.structs.replace(last, removed=0).encode() + b"\n"],
        [*lines[:2], other_signer.encode() + b"\n"],
        [lines[0], lines[2]],
        lines[1:],
        lines[:2],
        [lines[1], lines[0], lines[2]],
        [*lines, b"{}\n"],
        [*lines, b"\xff\n"],
        [],
    ]
    for each in altered:
        scene.records.write_bytes(b"".join(each))
        with pytest.raises(IntegrityFailure, match="erasure log"):
            scene.erasures().verify()
    scene.records.write_bytes(b"".join(lines))
    assert scene.erasures().verify().records == 3


def test_nothing_is_destroyed_while_the_records_cannot_be_written(scene: Scene) -> None:
    scene.records.write_bytes(b"{}\n")
    with pytest.raises(IntegrityFailure):
        scene.erase("alice")
    scene.records.unlink()
    scene.records.mkdir()
    with pytest.raises(Unavailable, match="erasure log"):
        scene.erase("alice")
    scene.records.rmdir()
    scene.erase("bob")
    lines = scene.records.read_bytes()
    scene.records.unlink()  # another host, whose erasure log is another file
    with pytest.raises(IntegrityFailure, match="another file"):
        scene.erase("alice")
    scene.records.write_bytes(lines)
    with FileErasureLog(scene.records).locked(), pytest.raises(Unavailable, match="Another process"):
        scene.erase("alice")
    assert keys_of(scene.settings).get(["alice"])
    assert scene.erase("alice").removed == 6


async def test_an_owner_in_another_process_removes_the_messages(scene: Scene) -> None:
    async with (
        open_mailbox(scene.store, MAILBOXES[0], erasure=scene.settings) as owner,
        connect(scene.store, MAILBOXES[0], erasure=scene.settings) as client,
    ):
        (delivery,) = await client.receive_messages("orders", max_messages=1)
        assert delivery.principal == "alice"
        with pytest.raises(InvalidRequest, match="is not destroyed"):
            await owner.erase_messages(keys_of(scene.settings).get(["alice"])["alice"].pseudonym)
        erasures = scene.erasures()
        record = await erasures.erase(erasures.preview("alice").subject)
        assert record.removed == 6
        await delivery.ack()  # which a consumer may still do
        await delivery.nack()
        with pytest.raises(StaleReceipt, match="now expired"):
            await delivery.extend(1_000)
        assert [each.principal for each in await client.receive_messages("orders")] == ["bob", "bob"]
    async with open_mailbox("memory:") as plain:
        with pytest.raises(InvalidRequest, match="no settings of erasure"):
            await plain.erase_messages("subject:1")
        with pytest.raises(InvalidRequest, match="pseudonym"):
            await plain.erase_messages(1)  # type: ignore[arg-type]


async def test_no_delivery_of_an_erased_subject_comes_back_or_becomes_a_dead_letter(scene: Scene) -> None:
    """Those in flight when an erasure is killed, and those that fail before it is completed."""
    policy, keys = TopicPolicy(max_attempts=1), keys_of(scene.settings)
    async with open_mailbox(
        scene.store, MAILBOXES[0], erasure=scene.settings, default_policy=policy
    ) as mailbox:
        deliveries = [each for each in await mailbox.receive_messages("orders") if each.principal == "alice"]
        keys.destroy(keys.get(["alice"])["alice"].pseudonym, NOW)  # where an erasure was killed
        await deliveries[0].nack()
        assert "alice" not in repr((await mailbox.list_dead_letters()).items)
        assert len((await mailbox.list_dead_letters()).items) == 3
        erasures = scene.erasures()
        (pending,) = erasures.list_pending()
        record = await erasures.erase(pending)
        assert {each.status for each in record.messages} == {"acked", "expired"}
        await deliveries[1].nack()
        assert len((await mailbox.list_dead_letters()).items) == 1  # of bob
        assert await mailbox.receive_messages("orders") == []
    assert scene.erasures().verify().records == 1


async def test_a_message_that_was_being_encrypted_when_its_key_was_destroyed_is_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, is_encrypting, may_go_on = keys_of(scene.settings), asyncio.Event(), Event()
    loop, get_or_create = asyncio.get_running_loop(), SqliteSubjectKeys.get_or_create

    def wait_with_keys(self: SqliteSubjectKeys, subjects: Collection[str]) -> Mapping[str, DataKey]:
        result = get_or_create(self, subjects)
        loop.call_soon_threadsafe(is_encrypting.set)
        assert may_go_on.wait(30)
        return result

    async with open_mailbox(scene.store, MAILBOXES[0], erasure=scene.settings) as mailbox:
        pseudonym = keys.get(["alice"])["alice"].pseudonym
        with monkeypatch.context() as patched:
            patched.setattr(SqliteSubjectKeys, "get_or_create", wait_with_keys)
            sending = asyncio.create_task(mailbox.send_message(_message("alice", "late")))
            await within(is_encrypting.wait())
            keys.destroy(pseudonym, NOW)
            erasing = asyncio.create_task(mailbox.erase_messages(pseudonym))
            await asyncio.sleep(0.05)  # without waiting for the send, it would end here
            may_go_on.set()
            assert await erasing == 4
        detail = await mailbox.get_message((await sending).message_id)
        assert (detail.status, detail.erased) == ("expired", True)


def test_messages_from_before_the_policy_are_counted_as_plaintext(scene: Scene) -> None:
    async def send() -> None:
        async with open_mailbox(scene.store, MAILBOXES[0], erasure=scene.settings) as mailbox:
            await mailbox.set_settings(SettingsChanges(subject_policies={"orders": None}))
            await mailbox.send_batch([_message(name, "clear") for name in ("alice", "alice", "bob")])
            policies = dict(scene.settings.topics)
            await mailbox.set_settings(SettingsChanges(subject_policies=policies))

    asyncio.run(send())
    assert scene.erasures().preview("alice").plaintext == 2


def test_a_record_names_the_ends_of_the_logs_and_who_signed(scene: Scene) -> None:
    record = scene.erase("alice")
    assert json.loads(scene.records.read_bytes()) == msgspec.to_builtins(record)
    assert record.is_signed_by(open_master_key(scene.settings))
    assert "alice" not in scene.records.read_text()
    for end in record.logs:
        with read_mailbox(scene.store, end.log) as reader:
            head = reader.log.head()
            assert head is not None
            assert (end.position, end.chain) == (head.position, head.chain.hex())


def test_the_erasure_of_a_name_that_is_no_text_is_refused(scene: Scene) -> None:
    for name in ("\ud800", 1, None):
        with pytest.raises(InvalidRequest, match="subject"):
            scene.erasures().preview(name)  # type: ignore[arg-type]
