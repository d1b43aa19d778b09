"""`postroom token`: what holders of a token do with it, and those who issue tokens."""

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from postroom.adapters.cli import token
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.remote import VARIABLE
from postroom.adapters.cli.restrictions import describe_quota, parse_operations, parse_quota
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.capability.access import verify
from postroom.domain.capability.rights import Expires, Quota, Right, Rights
from postroom.domain.capability.token import Identifier, Token, mint
from postroom.domain.errors import InvalidRequest, Unauthenticated

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]
SECRET = b"s" * 32
NOW_MS = 1_900_000_000_000
RIGHTS = Rights(("acme@*",), ("orders.*",), (Right.SEND, Right.ACK))


def make_token(rights: Rights = RIGHTS, expires: int = NOW_MS) -> str:
    """Return the text of a token that expires in the year 2030."""
    identifier = Identifier(
        key_id=b"k" * 8, nonce=b"n" * 16, principal="shop", epoch=1, issued_at=0, rights=rights
    )
    return mint(identifier, SECRET, [Expires(expires)]).encode()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command, which finds no token by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)

    def open_session(*, as_json: bool = False, wide: bool = False, **flags: str) -> Session:
        return Session("token", load_settings(flags, {}), Output(as_json, wide=wide))

    return open_session


@pytest.fixture
def token_file(session: Open) -> str:
    """Return a file with a token, which only its owner can read."""
    path = Path("token")
    path.touch(0o600)
    path.write_text(make_token() + "\n")
    return str(path)


def printed_token(captured: Captured) -> str:
    """Return the one line on stdout."""
    (line,) = captured.readouterr().out.splitlines()
    assert isinstance(line, str)
    return line


def document(captured: Captured) -> Any:
    return json.loads(captured.readouterr().out)


# -- attenuate ---


def test_a_token_is_narrowed_without_a_key_or_a_store(
    session: Open, token_file: str, capsys: Captured
) -> None:
    token.attenuate(
        session(),
        token_file,
        operation=["send"],
        topic=["orders.eu"],
        mailbox=["acme@one"],
        expires_in="1h",
        not_before="2026-01-01T00:00:00Z",
        quota=["10/1s", "1MB/1d"],
        max_messages=3,
        bind_principal=True,
    )
    access = verify(Token.decode(printed_token(capsys)), SECRET)
    assert access.operations == {Right.SEND}
    assert (access.covers_topic("orders.eu"), access.covers_topic("orders.us")) == (True, False)
    assert (access.covers_mailbox("acme@one"), access.covers_mailbox("acme@two")) == (True, False)
    assert (access.expires < NOW_MS, access.not_before) == (True, 1_767_225_600_000)
    assert access.quotas == (Quota(10, None, 1_000), Quota(None, 1_000_000, 86_400_000))
    assert (access.max_messages, access.binds_principal) == (3, True)
    assert list(Path().iterdir()) == [Path("token")]


def test_a_caveat_never_widens_a_token(session: Open, token_file: str, capsys: Captured) -> None:
    token.attenuate(session(), token_file, operation=["all"], topic=["*"], expires_in="3650d")
    access = verify(Token.decode(printed_token(capsys)), SECRET)
    assert access.operations == {Right.SEND, Right.ACK}
    assert not access.covers_topic("payments")
    assert access.expires == NOW_MS


def test_a_token_is_read_from_a_file_the_environment_or_stdin(
    session: Open, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def principal(file: str | None) -> Any:
        token.inspect(session(as_json=True), file)
        return document(capsys)["nonce"]

    monkeypatch.setattr("sys.stdin", io.StringIO(make_token()))
    assert principal(None) == (b"n" * 16).hex()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(WrongUsage, match="is empty"):
        principal("-")
    monkeypatch.setenv(VARIABLE, make_token())
    assert principal(None) == (b"n" * 16).hex()
    monkeypatch.setenv(VARIABLE, "prm1_junk")
    assert principal(token_file) == (b"n" * 16).hex()


def test_a_terminal_is_not_waited_for(session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(WrongUsage, match="--token-file, set POSTROOM_TOKEN"):
        token.inspect(session())


def test_a_file_that_others_may_read_is_reported(session: Open, token_file: str, capsys: Captured) -> None:
    Path(token_file).chmod(0o644)
    token.inspect(session(), token_file)
    assert "Other users may read the token in token; run chmod 600" in capsys.readouterr().err


def test_no_limit_is_wrong_usage(session: Open, token_file: str) -> None:
    with pytest.raises(WrongUsage, match="at least one limit"):
        token.attenuate(session(), token_file)


@pytest.mark.parametrize("text", ["junk", "prm1_junk", "é" * 9_000, "\x00"])
def test_what_is_not_a_token_is_refused_without_its_text(session: Open, capsys: Captured, text: str) -> None:
    Path("token").write_text(text)
    with pytest.raises(Unauthenticated) as refused:
        token.inspect(session(), "token")
    assert text not in str(refused.value)
    with pytest.raises(Unauthenticated):
        token.attenuate(session(), "token", topic=["a"])
    assert text not in capsys.readouterr().out


# -- writing ---


def test_a_token_can_be_written_to_a_file_that_only_its_owner_reads(
    session: Open, token_file: str, capsys: Captured
) -> None:
    Path("narrow").write_text("an old token")
    Path("narrow").chmod(0o644)
    token.attenuate(session(), token_file, topic=["orders.eu"], out="narrow")
    shown = capsys.readouterr()
    assert (shown.out, "in narrow" in shown.err) == ("", True)
    assert stat.S_IMODE(Path("narrow").stat().st_mode) == 0o600
    text = Path("narrow").read_text()
    assert len(Token.decode(text.strip()).caveats) == 2
    assert text not in shown.err
    assert sorted(each.name for each in Path().iterdir()) == ["narrow", "token"]


def test_nothing_is_left_when_a_token_can_not_be_written(session: Open, token_file: str) -> None:
    with pytest.raises(FileNotFoundError):
        token.attenuate(session(), token_file, topic=["a"], out="missing/narrow")
    Path("folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        token.attenuate(session(), token_file, topic=["a"], out="folder")
    assert sorted(each.name for each in Path().iterdir()) == ["folder", "token"]


def test_json_has_the_token_unless_it_is_in_a_file(session: Open, token_file: str, capsys: Captured) -> None:
    token.attenuate(session(as_json=True), token_file, topic=["a"])
    facts = document(capsys)
    assert (facts["nonce"], facts["principal"]) == ((b"n" * 16).hex(), "shop")
    assert len(Token.decode(facts["token"]).caveats) == 2
    token.attenuate(session(as_json=True), token_file, topic=["a"], out="narrow")
    facts = document(capsys)
    assert ("token" in facts, facts["file"]) == (False, "narrow")


# -- inspect ---


def test_a_token_is_shown_with_its_limits_and_without_its_tag(
    session: Open, token_file: str, capsys: Captured
) -> None:
    token.attenuate(
        session(),
        token_file,
        topic=["orders.eu"],
        operation=["send"],
        quota=["5/1m"],
        bind_principal=True,
        out="narrow",
    )
    token.inspect(session(), "narrow")
    shown = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in shown.splitlines())
    rows = [line.split() for line in shown.splitlines()]
    for row in (
        ["principal", "shop"],
        ["operations", "send"],
        ["topics", "orders.*", "issuer"],
        ["topics", "orders.eu", "caveat", "2"],
        ["quota", "5/1m", "caveat", "4"],
        ["principal", "of", "messages", "its", "own", "caveat", "5"],
    ):
        assert row in rows
    assert "valid, unless it was revoked or altered" in shown
    text = Path("narrow").read_text().strip()
    assert text not in shown
    assert Token.decode(text).tag.hex() not in shown
    token.inspect(session(as_json=True), "narrow")
    facts = document(capsys)
    assert (facts["operations"], facts["topics"]) == (["send"], [["orders.*"], ["orders.eu"]])
    assert facts["limits"][-2] == {"limit": "quota", "value": "5/1m", "by": "caveat 4"}
    assert facts["binds_principal"] is True


def test_the_validity_of_a_token_is_shown(session: Open, token_file: str, capsys: Captured) -> None:
    token.attenuate(session(), token_file, not_before="2h", out="later")
    token.inspect(session(as_json=True), "later")
    assert document(capsys)["validity"].startswith("valid in ")
    Path(token_file).write_text(make_token(expires=1))
    token.inspect(session(as_json=True), token_file)
    facts = document(capsys)
    assert facts["validity"].startswith("expired ")
    assert facts["expires"] == "1970-01-01T00:00:00.001000Z"


def test_the_longest_token_fits_the_terminal(session: Open, capsys: Captured) -> None:
    names = tuple(f"{'t' * 250}{number:03d}" for number in range(10))
    Path("token").write_text(make_token(Rights(names[:4], names[:6])))
    token.inspect(session(), "token")
    assert all(cell_len(line) <= 80 for line in capsys.readouterr().out.splitlines())


# -- values ---


@pytest.mark.parametrize("text", ["1000/1m", "50MB/1h", "1/1s", "0/1d", "1MiB/1m"])
def test_a_quota_is_shown_as_it_can_be_written(text: str) -> None:
    assert describe_quota(parse_quota(text)) == text


@pytest.mark.parametrize("text", ["", "1000", "1000/", "/1m", "1000/2m", "1e3/1m", "٣/1m", "-1/1m"])
def test_what_is_not_a_quota_is_wrong_usage(text: str) -> None:
    with pytest.raises(WrongUsage):
        parse_quota(text)


def test_operations_are_named_once_each_or_all_at_once() -> None:
    assert parse_operations(["ack, send", "send"]) == (Right.SEND, Right.ACK)
    assert parse_operations(["all"]) == tuple(Right)
    with pytest.raises(WrongUsage, match="Unknown operation 'read'; expected send, recv"):
        parse_operations(["read"])


def test_caveats_out_of_bounds_are_refused(session: Open, token_file: str) -> None:
    with pytest.raises(InvalidRequest, match="topics"):
        token.attenuate(session(), token_file, topic=[""])
    with pytest.raises(InvalidRequest, match="expires"):
        token.attenuate(session(), token_file, expires_in="100000000d")
