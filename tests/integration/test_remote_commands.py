"""Commands on a mailbox behind the URL of a server, with the token that it asks for."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from trustme import CA

from postroom.adapters.cli import dlq, inspect, messages, schedules, search, settlements, subscriptions, topic
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.remote import VARIABLE
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import NOTHING
from postroom.adapters.compose.serve import ServerTls, SurfaceProtection, TlsFiles
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated
from tests.support.access import Controlled, controlled_mailbox
from tests.support.surfaces import served

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
async def controlled() -> AsyncIterator[Controlled[Any, Any]]:
    """A mailbox in memory with access control."""
    async with controlled_mailbox() as controlled:
        yield controlled


@pytest.fixture(params=["http", "grpc"])
async def url(request: pytest.FixtureRequest, controlled: Controlled[Any, Any]) -> AsyncIterator[str]:
    """The URL of a server that asks for a token."""

    def access(*_: object) -> Any:
        return controlled.control.open_session

    async with served(controlled.mailbox, request.param, access=access) as url:
        yield url


@pytest.fixture
def session(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)

    def open_session(*, as_json: bool = False, **flags: str) -> Session:
        return Session("test", load_settings({"store": url} | flags, {}), Output(as_json))

    return open_session


def write_token(name: str, text: str) -> str:
    """Write a token to a file that only its owner can read, and return its path."""
    path = Path(name)
    path.touch(0o600)
    path.write_text(text)
    return name


async def test_messages_are_sent_received_and_settled(
    session: Open, controlled: Controlled[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv(VARIABLE, controlled.issue())
    await messages.send(session(), "orders", "hello")
    id_ = capsys.readouterr().out.strip()
    assert await messages.recv(session(as_json=True), "orders") is None
    received = json.loads(capsys.readouterr().out)
    assert (received["message_id"], received["payload"]) == (id_, "hello")
    assert await settlements.ack(session(), [received["receipt"]]) == 0
    assert await messages.recv(session(), "orders") == NOTHING
    await topic.pause(session(), "orders")
    await topic.policy(session(), "orders", ["max_attempts=3"])
    await dlq.redrive_dead_letters(session(), "orders")
    capsys.readouterr()
    assert await messages.recv(session(), "orders") == NOTHING
    assert "is paused" in capsys.readouterr().err


async def test_subscriptions_are_managed_and_topics_purged(
    session: Open, controlled: Controlled[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv(VARIABLE, controlled.issue())
    await subscriptions.set_subscription(session(), "mail", ["orders.*"], header=["country=de"])
    await messages.send(session(), "orders.eu", "hello", attr=["country=de"])
    capsys.readouterr()
    await subscriptions.show(session(as_json=True), "mail")
    assert json.loads(capsys.readouterr().out)["ready"] == 1
    await topic.purge(session(), "mail", yes=True)
    await subscriptions.list_subscriptions(session(as_json=True))
    (report,) = json.loads(capsys.readouterr().out.splitlines()[-1])["subscriptions"]
    assert (report["ready"], report["headers"]) == (0, {"country": "de"})
    await topic.policy(session(), "news", ["subscriptions_only=true"])
    assert await messages.recv(session(), "news") == NOTHING
    assert "go to subscriptions only" in capsys.readouterr().err
    await subscriptions.delete(session(), "mail", yes=True)
    with pytest.raises(NotFound):
        await subscriptions.delete(session(), "mail", yes=True)


async def test_schedules_are_managed(
    session: Open, controlled: Controlled[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv(VARIABLE, controlled.issue())
    await schedules.set_schedule(
        session(), "nightly", "reports", "hello", cron="0 3 * * *", attr=["country=de"]
    )
    await schedules.pause(session(), "nightly")
    await schedules.run_now(session(), "nightly")
    capsys.readouterr()
    await schedules.show(session(as_json=True), "nightly")
    report = json.loads(capsys.readouterr().out)
    assert (report["paused"], report["runs"], report["headers"]) == (True, 1, {"country": "de"})
    await schedules.resume(session(), "nightly")
    capsys.readouterr()
    await schedules.list_schedules(session())
    assert "0 3 * * *" in capsys.readouterr().out
    await schedules.delete(session(), "nightly", yes=True)
    with pytest.raises(NotFound):
        await schedules.delete(session(), "nightly", yes=True)


async def test_a_token_that_may_only_receive_is_enough_to_receive(
    session: Open, controlled: Controlled[Any, Any], capsys: Captured
) -> None:
    sender = write_token("sender", controlled.issue(operations=[Right.SEND]))
    receiver = write_token("receiver", controlled.issue(operations=[Right.RECV]))
    await messages.send(session(token_file=sender), "orders", "hello")
    assert await messages.recv(session(token_file=receiver), "orders") is None
    assert "Acknowledge with: postroom ack" in capsys.readouterr().err
    assert await messages.recv(session(token_file=receiver), "orders") == NOTHING
    assert "orders has no ready messages" in capsys.readouterr().err
    with pytest.raises(Forbidden):
        await messages.send(session(token_file=receiver), "orders", "hello")


async def test_a_token_or_another_mailbox_that_is_missing_is_refused(
    session: Open, controlled: Controlled[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unauthenticated):
        await messages.send(session(), "orders", "hello")
    with pytest.raises(Unauthenticated):  # before it is told which mailbox there is
        await messages.send(session(mailbox="other@one"), "orders", "hello")
    monkeypatch.setenv(VARIABLE, controlled.issue())
    with pytest.raises(NotFound, match="serves the mailbox"):
        await messages.send(session(mailbox="other@one"), "orders", "hello")


async def test_commands_that_use_the_store_itself_say_so(session: Open) -> None:
    for command in (inspect.backlog, search.stats):
        with pytest.raises(InvalidRequest, match="uses the store itself"):
            command(session())
    with pytest.raises(InvalidRequest, match="uses the store itself"):
        async with session().use():
            pass


async def test_the_certificates_of_settings_are_used(
    controlled: Controlled[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    authority = CA()
    leaf = authority.issue_cert("127.0.0.1")
    certificate, key, ca = (str(tmp_path / f"{name}.pem") for name in ("certificate", "key", "ca"))
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    monkeypatch.delenv(VARIABLE, raising=False)
    protection = SurfaceProtection(ServerTls(TlsFiles(certificate, key)))
    async with served(controlled.mailbox, "http", protection=protection) as url:
        environment = {"POSTROOM_STORE": url, "POSTROOM_CLIENT__CA": ca}
        await messages.send(Session("send", load_settings({}, environment), Output(False)), "orders", "hello")
    assert len(capsys.readouterr().out.strip()) == 36
