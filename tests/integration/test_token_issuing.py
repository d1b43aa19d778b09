"""`postroom token mint`, `revoke`, `rotate` and `list`, and access control over the tokens that they make."""

import json
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from postroom.adapters.cli import token, verification
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.restrictions import AccessSection
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import NOTHING, WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import (
    open_access_control,
    open_audit_log,
    open_capabilities,
    open_key_ring,
)
from postroom.adapters.compose.store import open_store
from postroom.application.access.control import AccessControl
from postroom.application.page import Page
from postroom.domain.capability.access import Access, verify
from postroom.domain.capability.rights import Quota, Right
from postroom.domain.capability.token import Token
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated
from postroom.domain.search import EventFilter, FoundMessage
from tests.support.stores import MAILBOX, message

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]
STORE = "store.db"
HOUR_MS = 3_600_000


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def open_session(*, as_json: bool = False, wide: bool = False, **flags: str) -> Session:
        settings = load_settings({"store": STORE} | flags, {}, flags.get("config"))
        return Session("token", settings, Output(as_json, wide=wide))

    return open_session


@pytest.fixture
def key(session: Open, capsys: Captured) -> str:
    """Make the first key of a store; return its id."""
    token.rotate(session(as_json=True))
    id_: str = document(capsys)["key_id"]
    return id_


def document(captured: Captured) -> Any:
    return json.loads(captured.readouterr().out)


def mint(session: Open, captured: Captured, **options: Any) -> dict[str, Any]:
    """Mint a token, and return what the command says of it."""
    token.mint(session(as_json=True), "shop", **({"operation": ["all"]} | options))
    facts: dict[str, Any] = document(captured)
    return facts


def rights(text: str) -> Access:
    """Return the rights of a token, verified with the store's newest key."""
    return verify(Token.decode(text), open_key_ring(STORE).root_keys()[-1].secret)


@asynccontextmanager
async def access_control() -> AsyncIterator[AccessControl]:
    """Control the access to a mailbox of the store, whose searches find nothing."""

    async def search(_: EventFilter) -> Page[FoundMessage]:
        return Page(())

    keys = open_key_ring(STORE)
    with open_capabilities(STORE, keys) as capabilities:
        async with (
            open_mailbox(STORE, MAILBOX, durability="relaxed") as mailbox,
            open_audit_log(open_store(STORE)) as audit_log,
            open_access_control(mailbox, search, capabilities, keys, audit_log) as control,
        ):
            yield control


# -- mint ---


def test_a_token_has_the_rights_that_options_describe(session: Open, key: str, capsys: Captured) -> None:
    token.mint(
        session(),
        "shop",
        operation=["send,ack"],
        mailbox=["acme@*"],
        topic=["orders.*"],
        expires_in="2h",
        quota=["10/1s"],
        max_messages=5,
    )
    shown = capsys.readouterr()
    access = rights(shown.out.strip())
    assert access.principal == "shop"
    assert access.operations == {Right.SEND, Right.ACK}
    assert (access.mailboxes, access.topics) == ((("acme@*",),), (("orders.*",),))
    assert (access.quotas, access.max_messages) == ((Quota(10, None, 1_000),), 5)
    assert access.key_id.hex() == key
    assert f"Nonce {access.nonce.hex()}, expires in " in shown.err
    assert shown.out.strip() not in shown.err


def test_a_token_expires_after_a_day_unless_told_otherwise(session: Open, key: str, capsys: Captured) -> None:
    facts = mint(session, capsys)
    identifier = Token.decode(facts["token"]).read_identifier()
    assert rights(facts["token"]).expires == identifier.issued_at + 24 * HOUR_MS
    with pytest.raises(InvalidRequest, match="lifetime_ms must be at most"):
        mint(session, capsys, expires_in="367d")


def test_a_token_is_written_to_a_file_and_its_capability_is_not_issued_if_that_fails(
    session: Open, key: str, capsys: Captured
) -> None:
    with pytest.raises(FileNotFoundError):
        mint(session, capsys, out="missing/token")
    token.list_capabilities(session(as_json=True))
    assert document(capsys) == {"capabilities": []}
    facts = mint(session, capsys, out="token")
    assert "token" not in facts
    assert rights(Path("token").read_text().strip()).nonce.hex() == facts["nonce"]
    assert stat.S_IMODE(Path("token").stat().st_mode) == 0o600


def test_operations_must_be_named(session: Open, key: str) -> None:
    with pytest.raises(WrongUsage, match="with --operation"):
        token.mint(session(), "shop")
    with pytest.raises(InvalidRequest, match="principal"):
        token.mint(session(), " ", operation=["send"])


def test_a_store_or_a_key_that_is_missing_is_named(session: Open) -> None:
    with pytest.raises(NotFound, match=r"no store at store\.db"):
        token.mint(session(), "shop", operation=["send"])
    assert not Path(STORE).exists()
    with open_capabilities(STORE):
        pass
    with pytest.raises(InvalidRequest, match="run postroom token rotate first"):
        token.mint(session(), "shop", operation=["send"])
    with pytest.raises(InvalidRequest, match="memory: and its keys end with this command"):
        token.rotate(session(store="memory:"))


def test_the_token_is_stored_nowhere(session: Open, key: str, capsys: Captured) -> None:
    text = mint(session, capsys)["token"]
    tag = Token.decode(text).tag
    for path in Path().iterdir():
        data = path.read_bytes()
        assert (text.encode() in data, tag in data, tag.hex().encode() in data) == (False, False, False)


# -- list, revoke, rotate ---


def test_capabilities_are_listed_with_their_status(session: Open, key: str, capsys: Captured) -> None:
    first = mint(session, capsys, topic=["t" * 200, "u" * 200])["nonce"]
    second = mint(session, capsys)["nonce"]
    assert token.revoke(session(), [first]) is None
    assert capsys.readouterr().out == "1 capability revoked\n"
    token.list_capabilities(session())
    shown = capsys.readouterr().out
    assert (second in shown, first in shown) == (True, False)
    token.list_capabilities(session(), principal="nobody")
    assert capsys.readouterr().out == "(none)\n"
    token.list_capabilities(session(), every=True)
    shown = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in shown.splitlines())
    assert "revoked" in shown
    token.list_capabilities(session(as_json=True), every=True)
    statuses = {each["nonce"]: each["status"] for each in document(capsys)["capabilities"]}
    assert statuses == {first: "revoked", second: "valid"}


def test_all_capabilities_are_revoked_at_once(session: Open, key: str, capsys: Captured) -> None:
    mint(session, capsys)
    with pytest.raises(WrongUsage, match="can't be undone; add --yes"):
        token.revoke(session(), every=True)
    token.revoke(session(as_json=True), every=True, yes=True)
    epoch = document(capsys)["epoch"]
    later = mint(session, capsys)
    assert rights(later["token"]).epoch == epoch
    token.list_capabilities(session(as_json=True))
    assert [each["nonce"] for each in document(capsys)["capabilities"]] == [later["nonce"]]
    with pytest.raises(InvalidRequest, match="has not begun"):
        token.revoke(session(), epoch=epoch + 1, yes=True)
    token.revoke(session(), epoch=epoch, yes=True)
    assert capsys.readouterr().out == f"Revoked; the epoch is now {epoch + 1}\n"


def test_all_capabilities_of_a_principal_are_revoked(session: Open, key: str, capsys: Captured) -> None:
    first, second = mint(session, capsys)["nonce"], mint(session, capsys)["nonce"]
    token.mint(session(), "till", operation=["send"])
    token.revoke(session(), [first])
    capsys.readouterr()
    assert token.revoke(session(as_json=True), principal="shop") is None
    assert document(capsys) == {"revoked": [second]}
    assert token.revoke(session(), principal="shop") == NOTHING
    capsys.readouterr()
    token.list_capabilities(session(as_json=True))
    assert [each["principal"] for each in document(capsys)["capabilities"]] == ["till"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"principal": "shop", "every": True},
        {"nonce": ["00" * 16], "every": True},
        {"epoch": 0, "every": True},
        {"nonce": ["zz"]},
    ],
)
def test_what_to_revoke_must_be_named_in_one_way(session: Open, key: str, options: dict[str, Any]) -> None:
    with pytest.raises(WrongUsage):
        token.revoke(session(), **options)


def test_a_nonce_that_was_not_issued_is_not_found(session: Open, key: str) -> None:
    with pytest.raises(NotFound, match="No capability has the nonce"):
        token.revoke(session(), ["00" * 16])


def test_tokens_of_the_key_before_are_valid_for_the_overlap(
    session: Open, key: str, capsys: Captured
) -> None:
    token.rotate(session(), "1h")
    assert "tokens of earlier keys are valid for 1h" in capsys.readouterr().out
    old, new = open_key_ring(STORE).root_keys()
    assert (old.id.hex(), new.retire_at) == (key, None)
    assert old.retire_at is not None
    assert abs(old.retire_at - new.created_at - HOUR_MS * 1_000) <= 1
    assert stat.S_IMODE(Path("store.db.keys").stat().st_mode) == 0o600


def test_the_key_file_can_be_named(session: Open, capsys: Captured) -> None:
    token.rotate(session(), key_file="elsewhere.keys")
    assert Path("elsewhere.keys").exists()
    assert not Path("store.db.keys").exists()
    Path("settings.toml").write_text('[access]\nkey_file = "elsewhere.keys"\ncap_cache_ttl = "5s"\n')
    token.mint(session(config="settings.toml"), "shop", operation=["send"])
    Path("settings.toml").write_text('[access]\ncap_cache_ttl = "5s"\n[access.quotas]\n"*" = "9/1m"\n')
    settings = session(config="settings.toml").settings.section("access", AccessSection).control()
    assert (settings.cap_cache_ttl_ms, settings.quota_of("shop")) == (5_000, Quota(9, None, 60_000))


# -- with access control ---


async def test_minted_tokens_open_sessions_until_they_are_revoked(
    session: Open, key: str, capsys: Captured
) -> None:
    facts = mint(session, capsys, topic=["orders"], operation=["send", "read-headers"])
    async with access_control() as control:
        opened = await control.open_session(facts["token"])
        await opened.mailbox.send_message(message())
        with pytest.raises(Forbidden):
            await opened.mailbox.send_message(message(topic="payments"))
        await opened.search(EventFilter(topics=("orders",), text="smith jones"))
        token.revoke(session(), [facts["nonce"]])
        await control.refresh()
        with pytest.raises(Unauthenticated):
            await control.open_session(facts["token"])
    capsys.readouterr()
    verification.audit(session(as_json=True))
    entry, refusal = document(capsys)["entries"]
    assert (refusal["operation"], refusal["topics"], refusal["outcome"]) == (
        "send",
        ["payments"],
        "E_CAP_SCOPE",
    )
    assert (entry["principal"], entry["capability"]) == ("shop", facts["nonce"])
    assert (entry["operation"], entry["topics"], entry["matches"]) == ("read-headers", ["orders"], 0)
    assert "text" in entry["criteria"]
    assert "smith" not in json.dumps(entry)
