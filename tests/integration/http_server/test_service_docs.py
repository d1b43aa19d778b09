"""The commands of docs/service.md print what the page shows, and its tables are those of the code."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from postroom.adapters.cli.serve import ServeSettings
from postroom.adapters.http_server.settings import HttpSettings
from tests.support.console import Session, read_steps
from tests.support.servers.http import PostroomServer
from tests.support.waiting import SECONDS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "service.md").read_text("utf-8")
SHOWN = "127.0.0.1:8080"


def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with PostroomServer(tmp_path) as server:

        def run(command: str) -> str:
            real = command.replace(SHOWN, f"127.0.0.1:{server.port}")
            # --json is of curl 7.82
            real = real.replace("--json", "-H 'Content-Type: application/json' -d")
            done = subprocess.run(
                real, shell=True, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            return done.stdout + done.stderr

        session = Session(run)
        steps = list(read_steps(PAGE))
        for step in steps:
            session(step)
        assert len(steps) == 6


def test_the_page_lists_all_settings() -> None:
    listed = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]+) \| `POSTROOM_SERVE", PAGE, re.MULTILINE)))
    )
    assert listed == {name.removesuffix("_ms") for name in ServeSettings.__struct_fields__}


def test_the_page_tells_the_defaults() -> None:
    defaults = HttpSettings()
    assert f"| {defaults.frame_bytes:,} |" in PAGE
    assert f"| {defaults.max_connections:,}, for" in PAGE
    shares = defaults.max_unauthenticated, defaults.max_unauthenticated_per_address
    assert f"| {shares[0]}, {shares[1]}: connections" in PAGE
    assert defaults.unauthenticated_timeout_ms == 5_000
    assert (defaults.header_timeout_ms, defaults.body_timeout_ms) == (5_000, 30_000)
    assert (defaults.idle_timeout_ms, defaults.write_timeout_ms) == (60_000, 30_000)
    assert (defaults.heartbeat_ms, defaults.stop_timeout_ms) == (5_000, 4_000)


def test_the_page_lists_every_call() -> None:
    paths = re.findall(r"`(?:GET|POST|PUT)?`?,? ?`?(?:GET |POST |PUT )?(/[\w/{}.]+)`", PAGE)
    contract = json.loads((ROOT / "docs/reference/openapi.json").read_text())
    undocumented = {path.split("/{msg_id}")[0] for path in contract["paths"]} - {
        path.split("/{msg_id}")[0] for path in paths
    }
    assert undocumented <= {"/v1/nack", "/v1/extend", "/v1/mailbox"}
