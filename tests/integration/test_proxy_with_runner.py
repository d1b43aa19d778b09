"""Two proxies, of which one has a runner in its own process, and a real admin."""

import asyncio
from pathlib import Path

import trustme

from postroom.adapters.compose import OwnerSettings
from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.control_plane import open_leases, open_node_access, serve_admin
from postroom.adapters.compose.proxy import LocalRunner, RunnerSettings, serve_proxy
from postroom.adapters.compose.serve import ServerTls, SurfaceProtection, TlsFiles, unrestricted
from postroom.adapters.grpc.client import connect_grpc
from tests.support.messages import message
from tests.support.waiting import SECONDS, until

MAILBOX, TOKEN = "acme@one", "t" * 32


async def test_a_mailbox_of_a_proxys_own_runner_is_used_through_every_proxy_of_a_cluster_with_tls(
    tmp_path: Path,
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = ca.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = ServerTls(TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), str(tmp_path / "ca.pem")))
    client = ClientTls(str(tmp_path / "ca.pem"), str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    access, protection = open_node_access(TOKEN, client), SurfaceProtection(tls)
    own = LocalRunner(
        str(tmp_path / "store.db"),
        RunnerSettings(
            runner="r1", proxy="one", mailboxes=(MAILBOX,), listen="127.0.0.1:1", owner=OwnerSettings()
        ),
        unrestricted,
    )
    with open_leases("memory:") as stores:
        async with (
            asyncio.timeout(SECONDS),
            serve_admin(stores, "127.0.0.1:0", access=access, protection=protection) as admin,
        ):
            admins = [admin.url.removeprefix("grpcs://")]
            async with (
                serve_proxy("two", admins, "127.0.0.1:0", access=access, protection=protection) as other,
                serve_proxy(
                    "one", admins, "127.0.0.1:0", access=access, protection=protection, runner=own
                ) as proxy,
            ):
                await until(lambda: proxy.host is not None and MAILBOX in proxy.host.served)
                for number, each in enumerate((proxy, other)):
                    async with connect_grpc(
                        each.address, timeout_ms=60_000, tls=client, mailbox=MAILBOX
                    ) as mailbox:
                        await mailbox.send_message(message(b"%d" % number))
                        (received,) = await mailbox.receive_messages("orders", wait_ms=60_000)
                        await received.ack()
                        assert received.payload == b"%d" % number
                assert await proxy.monitor.find_missing() == []
                samples = {each.name: each.samples for each in await proxy.monitor.collect()}
                assert dict(samples["postroom_proxy_answered"][-1][0]) == {"method": "send"}
            (lease,) = await admin.control_plane.list_leases(MAILBOX)
            assert (lease.status, lease.address) == ("released", proxy.address)
