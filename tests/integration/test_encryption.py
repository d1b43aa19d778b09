"""Messages of data subjects are stored as ciphertext, and delivered as they were sent."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from postroom.adapters.compose import OwnerSettings, open_mailbox
from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.erasures import Erasures
from postroom.adapters.compose.export import StoreSearchQueries, export_messages
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.compose.queries import open_read_models, read_mailbox, read_projections
from postroom.adapters.subject_keys.master_key import create_master_key, read_master_key
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.messages import MessageResult, NewMessage, Sent
from postroom.application.ports.read_models import ExportFormat, ExportOptions
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import (
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    Saturated,
    SettingsConflict,
    Unavailable,
)
from postroom.domain.message import MessageSent
from postroom.domain.names import message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter
from postroom.domain.settings import SettingsChanges
from postroom.domain.subject import SubjectPolicy
from tests.support.erasure import ORDERS, files_with, keys_of, new_erasure
from tests.support.redrives import ended
from tests.support.stores import envelope

ALICE, MAIL, CORRELATION, PAYLOAD = "Alice-Quentin", "alice@example.org", "visit-of-alice", "order-of-alice"
FORMATS: tuple[Literal["parquet", "csv", "json"], ...] = ("parquet", "csv", "json")
SECRETS = [ALICE, MAIL, CORRELATION, PAYLOAD]


def order(payload: str = PAYLOAD, principal: str = ALICE, **fields: Any) -> NewMessage:
    values: dict[str, Any] = {
        "topic": "orders",
        "attrs": {"email": MAIL, "region": "eu"},
        "correlation_id": CORRELATION,
    }
    return NewMessage(payload=payload.encode(), principal=principal, **(values | fields))


@pytest.fixture
def erasure(tmp_path: Path) -> ErasureSettings:
    (tmp_path / "secrets").mkdir()
    return new_erasure(tmp_path / "secrets")


async def use_every_file(folder: Path, erasure: ErasureSettings | None) -> None:
    """Let a mailbox write its log, WAL, snapshots, archive and dead letters."""
    async with open_mailbox(
        str(folder / "store.db"),
        durability="relaxed",
        erasure=erasure,
        archive=folder / "archive",
        default_policy=TopicPolicy(max_attempts=1),
    ) as mailbox:
        for _ in range(2):
            await mailbox.send_batch([order(f"{PAYLOAD} {number}") for number in range(100)])
        await mailbox.send_envelopes([envelope("e1", payload=PAYLOAD.encode(), principal=ALICE)])
        received = await mailbox.receive_messages("orders", max_messages=150)
        assert received[0].payload.decode() == f"{PAYLOAD} 0"
        await mailbox.ack_messages([each.receipt for each in received[:100]])
        await mailbox.nack_messages([each.receipt for each in received[100:]], reason="failed")
        await mailbox.engine.take_snapshot(whole=True)
        await mailbox.delete_old_events(older_than=mailbox.engine.now() + 1)
        await asyncio.to_thread(write_views_and_exports, str(folder / "store.db"), folder)
        await export_as_console(str(folder / "store.db"), mailbox.name, folder / "exports" / "console.json")
        shutil.copytree(
            folder, folder / "running", ignore=lambda _, names: [n for n in names if "socket" in n]
        )


def write_views_and_exports(store: str, folder: Path) -> None:
    _build_read_models(store, str(folder / "archive"))
    for format_ in FORMATS:
        export_messages(store, EventFilter(), format_, folder / "exports" / format_, payload=True)


async def export_as_console(store: str, mailbox: str, file: Path) -> None:
    options = ExportOptions(ExportFormat.JSON, payload=True)
    with closing(open_read_models(store)) as read_models:
        async with StoreSearchQueries(store, read_models, mailbox).export(EventFilter(), options) as parts:
            _write(str(file), b"".join([each.data async for each in parts]))


async def test_after_an_erasure_no_file_contains_the_subject_or_its_key(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    """Log, WAL, snapshots, read models, archive, exports, key store and records (ADR 0090)."""
    await use_every_file(tmp_path, erasure)
    store, master = str(tmp_path / "store.db"), read_master_key(Path(str(erasure.master_key_file)))
    with closing(sqlite3.connect(erasure.keys)) as connection:
        ((wrapped,),) = connection.execute("SELECT data_key FROM subjects").fetchall()
    pseudonym = keys_of(erasure).get([ALICE])[ALICE].pseudonym
    traces = {
        "wrapped": wrapped,
        "index": master.index(ALICE),
        "data key": master.unwrap(wrapped, pseudonym),
    }
    assert _traces(tmp_path, traces) == {"keys.db": ["wrapped", "index"]}
    settings = OwnerSettings(erasure=erasure)
    erasures = Erasures(store, ["main@local"], erasure, settings, str(tmp_path / "archive"))
    record = await erasures.erase(erasures.preview(ALICE).subject)
    assert sum(each.messages for each in record.messages) == 201
    assert _traces(tmp_path, traces) == {}
    assert files_with(tmp_path, SECRETS) == {}
    assert erasures.verify().erased == 201


def _traces(folder: Path, traces: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Return which files contain which bytes."""
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hits = {name: [each for each, trace in traces.items() if trace in file] for name, file in files.items()}
    return {name: each for name, each in hits.items() if each}


async def test_no_file_ever_contains_what_is_encrypted(tmp_path: Path, erasure: ErasureSettings) -> None:
    """Also not before an erasure; without encryption the same search finds everything."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "encrypted").mkdir()
    await use_every_file(tmp_path / "plain", None)
    await use_every_file(tmp_path / "encrypted", erasure)
    plain = files_with(tmp_path / "plain", SECRETS)
    assert plain["store.db"] == SECRETS
    folders = {path.partition("/")[0] for path in plain}
    assert folders == {"store.db", "store.db-views", "archive", "running", "exports"}
    assert {Path(path).suffix for path in plain} >= {".db", ".db-wal", ".parquet"}
    assert {f"exports/{format_}" for format_ in FORMATS} <= plain.keys()
    assert plain["exports/console.json"] == SECRETS
    assert files_with(tmp_path / "encrypted", SECRETS) == {}
    assert files_with(tmp_path / "secrets", SECRETS) == {}


async def test_consumers_and_operators_see_messages_as_they_were_sent(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store = str(tmp_path / "store.db")
    external = parse_envelope(envelope("e1", payload=b"external", principal=ALICE, baggage={"user": MAIL}))
    external.security.signature, external.security.auth_token = b"signed", "token"
    async with open_mailbox(store, erasure=erasure) as mailbox:
        sent = await mailbox.send_message(order())
        await mailbox.send_envelopes([external.SerializeToString()])
        (peeked, _) = await mailbox.peek_messages("orders")
        assert (peeked.payload, dict(peeked.attrs)) == (PAYLOAD.encode(), {"email": MAIL, "region": "eu"})
        first, second = await mailbox.receive_messages("orders")
        assert (first.payload, first.principal, first.correlation_id, first.encryption) == (
            PAYLOAD.encode(),
            ALICE,
            CORRELATION,
            None,
        )
        assert first.attrs == {"email": MAIL, "region": "eu"}
        del first
        external.security.ClearField("auth_token")  # never delivered
        assert parse_envelope(second.envelope) == external
    with read_mailbox(store, erasure=erasure) as reader:
        detail = reader.get_message(sent.message_id)
        assert (detail.intact, detail.erased, detail.item.principal) == (True, False, ALICE)
        assert reader.verify_log().messages == 2
    with read_mailbox(store) as reader:
        item = reader.get_message(sent.message_id).item
    assert (item.encryption, item.custom_headers["region"]) == ("postroom-aes-siv", "eu")
    assert not any(text in repr(item) + repr(item.envelope_blob) for text in SECRETS)


async def test_repetitions_are_recognised_by_their_plaintext(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    for _ in range(2):  # also after a restart
        async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
            await mailbox.send_message(order(idem_key="k"))
            await mailbox.send_message(order("another", message_id="m"))
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        assert (await mailbox.send_message(order(idem_key="k"))).duplicate
        assert await mailbox.send_message(order("another", message_id="m")) == Sent("m", duplicate=True)
        for other in (order("other", idem_key="k"), order("other", message_id="m")):
            with pytest.raises(IdempotencyConflict):
                await mailbox.send_message(other)
        assert (await mailbox.get_backlog()).ready == 2


async def test_a_message_that_cannot_be_encrypted_is_refused_and_the_others_are_stored(
    erasure: ErasureSettings,
) -> None:
    async with open_mailbox("memory:", erasure=erasure) as mailbox:
        results = await mailbox.send_batch([order(principal=""), order(), order(topic="others")])
        assert isinstance(results[0], InvalidRequest)
        assert "orders need principal" in str(results[0])
        assert isinstance(results[1], Sent)
        stream = message_stream(mailbox.name, results[1].message_id)
        stored = mailbox.engine.log.read_stream(stream)[0].event
        assert isinstance(stored, MessageSent)
        (again,) = await mailbox.send_envelopes([stored.envelope])
        assert isinstance(again, InvalidRequest)
        assert "one that Postroom encrypted" in str(again)
        assert (await mailbox.get_backlog()).ready == 2


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _write(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


async def test_without_its_key_store_a_mailbox_stores_nothing_in_the_clear(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        await mailbox.send_message(order())
        content = _read(erasure.keys)
        _write(erasure.keys, b"x" * len(content))
        with pytest.raises(Unavailable, match=r"key store .*keys\.db can't be used"):
            await mailbox.send_message(order("another"))
        with pytest.raises(Saturated, match=r"keys\.db"):
            await mailbox.receive_messages("orders")
        os.unlink(erasure.keys)
        with pytest.raises(NotFound, match="no key store"):
            await mailbox.send_message(order("another"))
        with pytest.raises(NotFound, match="no key store"):
            await mailbox.receive_messages("orders")
        assert len(await mailbox.send_batch([NewMessage(topic="others", payload=b"x")])) == 1
        _write(erasure.keys, content)
        (received,) = await mailbox.receive_messages("orders")
        assert received.payload.decode() == PAYLOAD
    assert files_with(tmp_path, SECRETS) == {}


async def test_an_owner_without_the_key_store_stores_no_result_of_an_encrypted_message(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    """Its topic lost its policy, so an owner without keys may open the mailbox."""
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, erasure=erasure) as mailbox:
        await mailbox.send_message(order())
        await mailbox.set_settings(SettingsChanges(subject_policies={"orders": None}))
    async with open_mailbox(store) as mailbox:
        await mailbox.send_message(order())
        encrypted, plain = await mailbox.receive_messages("orders", max_messages=2)
        receipts, results = [encrypted.receipt, plain.receipt], [MessageResult(b"ok")] * 2
        refused, answer = await mailbox.ack_messages(receipts, results=results)
        assert answer is None
        assert isinstance(refused, InvalidRequest)
        assert "give the owner the key store, or ack without a result" in str(refused)
        await encrypted.ack()


async def test_an_owner_without_the_key_store_copies_no_encrypted_message(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store, policy = str(tmp_path / "store.db"), TopicPolicy(max_attempts=1)
    async with open_mailbox(store, erasure=erasure, default_policy=policy) as mailbox:
        await mailbox.send_message(order())
        await mailbox.set_settings(SettingsChanges(subject_policies={"orders": None}))
        await mailbox.send_message(order("plain"))
        for each in await mailbox.receive_messages("orders"):
            await each.nack()
    async with open_mailbox(store) as mailbox:
        spec = RedriveSpec(destination="repaired", set_headers={"by": "ops"})
        report = await ended(mailbox, await mailbox.start_redrive(spec))
        assert (report.moved, report.skipped) == (1, 1)
    keys = msgspec.structs.replace(erasure, topics={})
    async with open_mailbox(store, erasure=keys) as mailbox:
        (copy,) = await mailbox.receive_messages("repaired", max_messages=2)
        assert copy.payload == b"plain"
        assert (await mailbox.redrive_dead_letters("orders")) == 1
        (original,) = await mailbox.receive_messages("orders")
        assert original.payload.decode() == PAYLOAD


async def test_an_owner_without_the_key_store_sends_no_encrypted_message(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, erasure=erasure) as mailbox:
        stream = message_stream(mailbox.name, (await mailbox.send_message(order())).message_id)
        sent = mailbox.engine.log.read_stream(stream)[0].event
        assert isinstance(sent, MessageSent)
        await mailbox.set_settings(SettingsChanges(subject_policies={"orders": None}))
    stored = parse_envelope(sent.envelope)
    stored.metadata.message_id = "another"
    async with open_mailbox(store) as mailbox:
        plain = envelope("plain")
        refused, answer = await mailbox.send_envelopes([stored.SerializeToString(), plain])
        assert isinstance(answer, Sent)
        assert isinstance(refused, InvalidRequest)
        assert "send it as it was delivered by an owner with the key store" in str(refused)
        assert (await mailbox.get_backlog()).ready == 2


async def test_another_master_key_or_key_store_is_refused(tmp_path: Path, erasure: ErasureSettings) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, erasure=erasure) as mailbox:
        await mailbox.send_message(order())
    create_master_key(tmp_path / "other.key")
    wrong = ErasureSettings(
        keys=erasure.keys, topics=erasure.topics, master_key_file=str(tmp_path / "other.key")
    )
    key_ids = [read_master_key(Path(str(each.master_key_file))).key_id for each in (erasure, wrong)]
    with pytest.raises(InvalidRequest, match=f"{key_ids[0]}, not by {key_ids[1]}"):
        async with open_mailbox(store, erasure=wrong):
            pass
    (tmp_path / "others").mkdir()
    async with open_mailbox(store, erasure=new_erasure(tmp_path / "others")) as mailbox:
        with pytest.raises(NotFound, match="use the key store with which the message was sent"):
            await mailbox.receive_messages("orders")
    async with open_mailbox(store, erasure=erasure) as mailbox:
        assert len(await mailbox.receive_messages("orders")) == 1


async def test_a_ciphertext_that_its_key_does_not_decrypt_is_quarantined(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    keys = keys_of(erasure)
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        sent = await mailbox.send_message(order())
        await mailbox.send_message(order("of-bob", principal="bob"))
        pseudonym = keys.get(["bob"])["bob"].pseudonym
        master = read_master_key(Path(str(erasure.master_key_file)))
        with closing(sqlite3.connect(erasure.keys)) as connection, connection:
            key = master.wrap(bytes(96), pseudonym)
            connection.execute("UPDATE subjects SET data_key = ? WHERE pseudonym = ?", (key, pseudonym))
        (received,) = await mailbox.receive_messages("orders")
        assert received.message_id == sent.message_id
        (letter,) = (await mailbox.list_dead_letters()).items
        assert letter.reason == "integrity"
        assert not (await mailbox.get_message(letter.message_id)).intact


async def test_a_message_whose_key_was_destroyed_is_removed_instead_of_delivered(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    keys = keys_of(erasure)
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        sent = await mailbox.send_message(order())
        await mailbox.send_message(order("of-bob", principal="bob"))
        keys.destroy(keys.get([ALICE])[ALICE].pseudonym, 1)
        assert [each.payload for each in await mailbox.peek_messages("orders")] == [None, b"of-bob"]
        (received,) = await mailbox.receive_messages("orders")
        assert received.principal == "bob"
        detail = await mailbox.get_message(sent.message_id)
        assert (detail.status, detail.erased, detail.intact) == ("expired", True, True)
        assert detail.history[-1].facts["reason"] == "erased"
        assert "key of its subject" in (await mailbox.explain_message(sent.message_id)).now
        assert (await mailbox.get_backlog()).ready == 0


async def test_copies_of_dead_letters_are_edited_in_the_clear_and_stored_encrypted(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    policy = TopicPolicy(max_attempts=1)
    async with open_mailbox(str(tmp_path / "s.db"), erasure=erasure, default_policy=policy) as mailbox:
        await mailbox.send_batch(
            [
                order('{"city": "Bonn-am-Rhein"}', attrs={"email": MAIL}),
                order(f'{{"name": "{ALICE}"}}', principal="bob"),
            ]
        )
        for each in await mailbox.receive_messages("orders"):
            await each.nack()
        keys = keys_of(erasure)
        keys.destroy(keys.get(["bob"])["bob"].pseudonym, 1)
        spec = RedriveSpec(destination="repaired", merge_patch='{"state": 1}', set_headers={"by": "ops"})
        report = await ended(mailbox, await mailbox.start_redrive(spec))
        assert (report.moved, report.skipped) == (1, 1)
        (copy,) = await mailbox.receive_messages("repaired")
        assert copy.json() == {"city": "Bonn-am-Rhein", "state": 1}
        assert (copy.principal, copy.attrs) == (ALICE, {"email": MAIL, "by": "ops"})
    assert files_with(tmp_path, [*SECRETS, "Bonn-am-Rhein"]) == {}


async def test_a_redrive_job_selects_by_subject_and_encrypted_fields_and_its_record_names_neither(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    policy = TopicPolicy(max_attempts=1)
    async with open_mailbox(str(tmp_path / "s.db"), erasure=erasure, default_policy=policy) as mailbox:
        await mailbox.send_batch(
            [order(), order(attrs={"email": "other@example.org"}), order("of-bob", principal="bob")]
        )
        for each in await mailbox.receive_messages("orders"):
            await each.nack()
        specs = [
            RedriveSpec(principals=(ALICE, "nobody")),
            RedriveSpec(principals=(ALICE,), headers={"email": MAIL}, correlation_id=CORRELATION),
            RedriveSpec(principals=("nobody",)),
        ]
        assert [(await mailbox.preview_redrive(each)).matched for each in specs] == [2, 1, 0]
        assert (await ended(mailbox, await mailbox.start_redrive(specs[1]))).moved == 1
        (received,) = await mailbox.receive_messages("orders")
        assert received.attrs["email"] == MAIL
    assert files_with(tmp_path, SECRETS) == {}


async def test_an_owner_encrypts_for_processes_without_settings_as_the_mailbox_says(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, erasure=erasure), connect(store) as other:
        await other.send_message(order())
        (received,) = await other.receive_messages("orders")
        assert received.principal == ALICE
    other_policies = ErasureSettings(
        keys=erasure.keys,
        topics={"orders": SubjectPolicy("principal")},
        master_key_file=erasure.master_key_file,
    )
    with pytest.raises(InvalidRequest, match="open it with the settings of erasure"):
        async with open_mailbox(store):
            pass
    conflict = r"erasure.topics.orders is principal correlation_id .*, not principal\. .* `postroom apply`"
    with pytest.raises(SettingsConflict, match=conflict):
        async with open_mailbox(store, erasure=other_policies):
            pass
    async with open_mailbox(store, erasure=msgspec.structs.replace(erasure, topics={})):
        with pytest.raises(SettingsConflict, match=conflict):
            async with connect(store, erasure=other_policies, timeout_ms=5_000):
                pass
        async with connect(store) as other:
            await other.send_message(order())
    assert files_with(tmp_path, SECRETS) == {}


async def test_messages_are_found_by_their_subject_and_then_by_encrypted_fields(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    """In the read models and, without them, among the unsettled messages (RFC-037 `QueryEvents`)."""
    store = str(tmp_path / "store.db")
    matching = [
        EventFilter(principals=(ALICE,)),
        EventFilter(principals=(ALICE, "nobody"), headers={"email": MAIL, "region": "eu"}),
        EventFilter(principals=(ALICE,), correlation_id=CORRELATION),
    ]
    others = [
        EventFilter(principals=("nobody",)),
        EventFilter(principals=(ALICE,), headers={"email": "other"}),
        EventFilter(correlation_id=CORRELATION),  # a token depends on the subject
        EventFilter(text=ALICE),
    ]
    for address in (store, "memory:"):
        async with open_mailbox(address, erasure=erasure) as mailbox:
            sent = await mailbox.send_message(order())
            await mailbox.send_message(order("of-bob", principal="bob"))
            if address == store:
                await asyncio.to_thread(_build_read_models, store)
            for filter_ in matching:
                page = await mailbox.search_messages(filter_)
                assert [each.message_id for each in page.items] == [sent.message_id], filter_
            for filter_ in others:
                assert (await mailbox.search_messages(filter_)).items == (), filter_
    with read_projections(store, erasure=erasure) as projections:
        assert len(projections.search_messages(EventFilter(principals=("bob",))).items) == 1


def _build_read_models(store: str, archive: str | None = None) -> None:
    rebuild_projections(store, runner=LocalTaskRunner(), archive=archive)


async def test_concurrent_sends_are_stored_in_the_order_of_their_calls(erasure: ErasureSettings) -> None:
    async with open_mailbox("memory:", erasure=erasure) as mailbox:
        numbers = [str(number) for number in range(200)]
        await asyncio.gather(
            *(
                mailbox.send_message(order(each, principal=f"p{len(each)}", sticky_key="k"))
                for each in numbers
            )
        )
        received = await mailbox.receive_messages("orders", max_messages=200)
        assert [each.payload.decode() for each in received] == numbers


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"keys": 1}, "keys"),
        ({"keys": "a\0b"}, "keys"),
        ({"topics": []}, "mapping"),
        ({"topics": {"orders": {"subject": "principal"}}}, "policy of topic orders"),
        ({"topics": {"": ORDERS}}, "Topic name"),
        ({"topics": {"orders": SubjectPolicy("topic")}}, "principal, correlation_id"),
        ({"topics": {"orders": SubjectPolicy("attrs.")}}, "attrs.NAME"),
        ({"topics": {"orders": SubjectPolicy("principal", ("principal",))}}, "must differ"),
        ({"topics": {"orders": SubjectPolicy("principal", "email")}}, "encrypt of topic orders"),  # type: ignore[arg-type]
        ({"topics": {"orders": SubjectPolicy("principal", (1,))}}, "must be of type str"),  # type: ignore[arg-type]
        ({"topics": {"orders": SubjectPolicy("attrs.\ud800")}}, "surrogate"),
        ({"master_key_file": None}, "one master key"),
        ({"master_key_variable": "KEY"}, "one master key"),
        ({"master_key_file": 7}, "master_key_file"),
    ],
)
async def test_wrong_settings_are_refused_by_name(
    erasure: ErasureSettings, fields: dict[str, Any], problem: str
) -> None:
    valid = {"keys": erasure.keys, "topics": erasure.topics, "master_key_file": erasure.master_key_file}
    with pytest.raises(InvalidRequest, match=problem):
        async with open_mailbox("memory:", erasure=ErasureSettings(**(valid | fields))):
            pass
