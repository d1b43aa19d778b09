"""Long-running commands reload settings at SIGHUP, and tell the service manager how they are."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from postroom import NewMessage, TopicPolicy, open_mailbox
from postroom.adapters.cli.config import all_settings
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.running import Reload, mailbox_settings, running, tls_certificates
from postroom.adapters.cli.serve import principal_quotas
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import Settings, load_settings
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring
from postroom.adapters.compose.serve import ServerTls, TlsFiles
from postroom.adapters.system.host import ServiceManager
from postroom.application.page import Page
from postroom.domain.errors import InvalidRequest, Saturated
from postroom.domain.search import EventFilter, FoundMessage
from tests.support.logs import capture_logs
from tests.support.servers.http import PostroomServer
from tests.support.waiting import until, wait_until

RELOADED, FAILED, RESTART = "settings.reloaded", "settings.reload_failed", "settings.restart_needed"


class Manager:
    """The service manager's end of the socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)
        self._messages: list[str] = []

    @property
    def messages(self) -> list[str]:
        """Return the first lines of all messages so far."""
        try:
            while True:
                self._messages.append(self.socket.recv(4_096).decode().splitlines()[0])
        except BlockingIOError:
            return self._messages


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    path = os.path.relpath(tmp_path / "notify")  # a socket's path is short
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    manager = Manager(path)
    yield manager
    manager.socket.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "postroom.toml"
    write(file, "[topics.orders]\nmax_attempts = 3\n")
    return file


def write(file: Path, text: str, level: str = "info") -> None:
    file.write_text(f'log_level = "{level}"\n{text}')


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:") as opened:
        yield opened


async def policy(mailbox: OwnedMailbox, topic: str) -> TopicPolicy:
    stored = await mailbox.get_topic_policy(topic)
    assert stored is not None
    return stored


def session(file: Path) -> Session:
    def load() -> Settings:
        return load_settings({}, {}, str(file))

    def check(settings: Settings) -> None:
        list(all_settings(Session("test", settings, Output(True))))

    return Session("test", load(), Output(True), load=load, check=check)


@pytest.fixture(autouse=True)
def _hang_ups_arrive() -> Iterator[None]:
    """Have SIGHUP arrive, which `nohup make test` has every process ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@asynccontextmanager
async def command(file: Path, mailbox: OwnedMailbox, *more: Reload) -> AsyncIterator[list[dict[str, Any]]]:
    """Run a command; yield the events that it logs."""
    opened = session(file)
    with capture_logs() as events:
        async with running(opened, lambda: None, [mailbox_settings(opened, mailbox), *more]):
            yield events


async def reload(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send SIGHUP; return the events of the reload."""
    start = len(events)
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: any(each["event"] in (RELOADED, FAILED) for each in events[start:]))
    return events[start:]


async def test_a_reload_applies_changed_policies_of_topics(file: Path, mailbox: OwnedMailbox) -> None:
    async with command(file, mailbox) as events:
        write(file, '[topics.orders]\nmax_attempts = 7\n[topics.invoices]\nvisibility = "9s"\n')
        assert [each["event"] for each in await reload(events)] == [RELOADED]
    assert (await policy(mailbox, "orders")).max_attempts == 7
    assert (await policy(mailbox, "invoices")).visibility_ms == 9_000


@pytest.mark.parametrize(
    "text",
    ["no toml [", "unknown = 1\n", "[topics.orders]\nmax_attempts = 0\n", "[inbox]\nconcurency = 5\n"],
)
async def test_an_invalid_file_changes_nothing_and_is_one_error(
    file: Path, mailbox: OwnedMailbox, text: str
) -> None:
    before = TopicPolicy(max_attempts=4)
    await mailbox.set_topic_policy("orders", before)
    async with command(file, mailbox) as events:
        write(file, text)
        (event,) = await reload(events)
        assert (event["event"], event["log_level"]) == (FAILED, "error")
        assert str(file) in event["error"]
        assert await mailbox.get_topic_policy("orders") == before
        write(file, "[topics.orders]\nmax_attempts = 5\n")
        assert [each["event"] for each in await reload(events)] == [RELOADED]
        assert (await policy(mailbox, "orders")).max_attempts == 5


async def test_settings_that_need_a_restart_are_named_without_their_values(
    file: Path, mailbox: OwnedMailbox
) -> None:
    async with command(file, mailbox) as events:
        write(
            file,
            'store = "other.db"\n[policy]\nmax_attempts = 9\n[limits]\ntopics = 5\n'
            '[inbox]\nsigning_key = "whsec_canary"\n',
            "debug",
        )
        later, done = await reload(events)
    assert (later["event"], done["event"]) == (RESTART, RELOADED)
    assert later["settings"] == "inbox.signing_key, store"
    settings = await mailbox.get_settings()
    assert (settings.limits.topics, settings.default_policy.max_attempts) == (5, 9)
    assert "canary" not in str(events)


async def test_a_reload_by_which_something_would_be_lost_changes_nothing(
    file: Path, mailbox: OwnedMailbox
) -> None:
    await mailbox.set_topic_policy("orders", {"max_attempts": 1})
    await mailbox.send_batch([NewMessage(topic="orders", payload=b"x") for _ in range(3)])
    for each in await mailbox.receive_messages("orders"):
        await each.nack(reason="broken")
    before = await mailbox.get_settings()
    async with command(file, mailbox) as events:
        write(file, "[policy]\ndead_capacity = 1\n[limits]\ntopics = 5\n")
        (event,) = await reload(events)
        assert (event["event"], event["what"]) == (FAILED, "mailbox settings")
        assert "A reload would lose data: 2 dead letters of orders expire now." in event["error"]
        assert "postroom apply" in event["error"]
        assert await mailbox.get_settings() == before
        write(file, "[limits]\ntopics = 5\n")
        assert [each["event"] for each in await reload(events)] == [RELOADED]
    assert (await mailbox.get_settings()).limits.topics == 5
    assert len((await mailbox.list_dead_letters("orders")).items) == 3


async def test_what_fails_to_reload_keeps_nothing_else_from_it(file: Path, mailbox: OwnedMailbox) -> None:
    async def apply(settings: Settings) -> None:
        raise InvalidRequest("The certificate tls.pem has expired; renew it.")

    async with command(file, mailbox, Reload("TLS certificates", apply)) as events:
        write(file, "[topics.orders]\nmax_attempts = 6\n")
        (event,) = await reload(events)
    assert (event["event"], event["what"]) == (FAILED, "TLS certificates")
    assert (await policy(mailbox, "orders")).max_attempts == 6


async def test_reloaded_quotas_apply_to_tokens_in_use(
    file: Path, mailbox: OwnedMailbox, tmp_path: Path
) -> None:
    async def search(filter_: EventFilter) -> Page[FoundMessage]:
        return Page(())

    store = str(tmp_path / "store.db")
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("shop")
    async with open_access(store) as access:
        open_session = access(mailbox, search)

        async def send() -> None:
            await (await open_session(token)).mailbox.send_message(NewMessage(topic="orders", payload=b"1"))

        async with command(file, mailbox, principal_quotas(access)) as events:
            await send()
            write(file, '[topics.orders]\nmax_attempts = 3\n[access]\nquotas = {shop = "1/1d"}\n')
            assert [each["event"] for each in await reload(events)] == [RELOADED]
            await send()
            with pytest.raises(Saturated):
                await send()
            write(file, '[access]\nquotas = {shop = "many"}\n')
            assert [each["event"] for each in await reload(events)] == [FAILED]
            with pytest.raises(Saturated):
                await send()


async def test_a_reloaded_certificate_is_used_unless_it_is_invalid(tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"

    def issue() -> bytes:
        issued = trustme.CA().issue_cert("localhost")
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return issued.cert_chain_pems[0].bytes()

    issue()
    tls = ServerTls(TlsFiles(str(certificate), str(key)))
    second, reloading = issue(), tls_certificates(tls)
    await reloading.apply(Settings())
    assert tls.loaded.certificate == second
    write(certificate, "no certificate")
    with pytest.raises(InvalidRequest, match="tls_certificate"):
        await reloading.apply(Settings())
    assert tls.loaded.certificate == second


async def test_the_service_manager_hears_of_start_reload_and_stop(
    file: Path, mailbox: OwnedMailbox, manager: Manager
) -> None:
    async with command(file, mailbox) as events:
        await until(lambda: manager.messages == ["READY=1"])
        await reload(events)
        await until(lambda: manager.messages == ["READY=1", "RELOADING=1", "READY=1"])
    assert manager.messages[3:] == ["STOPPING=1"]


async def test_the_watchdog_hears_from_a_healthy_loop_only(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    task = asyncio.create_task(ServiceManager().watch())
    await until(lambda: manager.messages.count("WATCHDOG=1") >= 3)
    task.cancel()
    await asyncio.wait([task])
    monkeypatch.setenv("WATCHDOG_PID", "1")  # of another process
    count = len(manager.messages)
    await ServiceManager().watch()
    assert len(manager.messages) == count


async def test_a_service_manager_that_is_gone_does_not_disturb_the_command(
    file: Path, mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    async with command(file, mailbox) as events:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"1"))
    assert {each["event"] for each in events} == {"service_manager.unreachable"}


def test_a_server_reloads_and_keeps_its_connections(tmp_path: Path, manager: Manager) -> None:
    with PostroomServer(tmp_path / "served") as server, closing(server.connect()) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        used = connection.sock
        config = tmp_path / "served" / "postroom.toml"
        more = '\n[topics.orders]\nmax_attempts = 2\n[archive]\nfolder = "x"\n'
        config.write_text(f"{config.read_text()}{more}")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: RELOADED in server.log)
        assert "archive.folder" in server.log
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        assert connection.sock is used
        wait_until(lambda: manager.messages == ["READY=1", "RELOADING=1", "READY=1"])
    assert manager.messages[3] == "STOPPING=1"
