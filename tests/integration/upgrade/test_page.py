"""The page on versions states the formats of the code, and clients of the last release are served."""

import json
import re
import subprocess
import sys
from pathlib import Path

from postroom.adapters.local import protocol
from postroom.adapters.parquet import log_archive, segment_files
from postroom.application.backup import manifest
from postroom.application.mailbox import codec
from postroom.domain.mailbox import snapshot
from postroom.projections import plan
from scripts.openapi import COPY, breaking_changes
from scripts.release import read_section
from tests.integration.upgrade.conftest import read_outcomes
from tests.support.releases import LAST, ROOT, read_files

FORMATS = {
    "store": (codec.FORMAT, f"{codec.RECORDS + 1} to {codec.FORMAT}"),
    "snapshots in a store": (snapshot.VERSION, f"{snapshot.READABLE[0]} to {snapshot.READABLE[-1]}"),
    "files of the log archive": (
        segment_files.FORMAT,
        f"{log_archive._FIRST_FORMATS} to {segment_files.FORMAT}",
    ),
    "backups": (manifest.FORMAT, f"{manifest.FORMAT}"),
    "tables of read models": (int(plan.FORMAT), plan.FORMAT),
    "protocol of the local socket and of owners on other hosts": (protocol.VERSION, f"{protocol.VERSION}"),
}


def test_the_page_states_the_formats_that_the_code_writes_and_reads() -> None:
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+(?: to \d+)?)", page, re.MULTILINE)
    assert {name: (int(written), read) for name, written, read in rows} == FORMATS


def test_every_outcome_of_the_page_has_a_test() -> None:
    tests = "".join(file.read_text("utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    meetings = {meeting for meeting, _, _ in read_outcomes()}
    assert [each for each in sorted(meetings) if f'"{each}"' not in tests] == []


def test_the_last_release_is_the_newest_one_of_the_changelog_before_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[1] == LAST
    assert read_section(ROOT, LAST)[0] is not None


def test_clients_of_the_last_release_are_served_by_http_and_grpc(tmp_path: Path) -> None:
    files = read_files(LAST)
    files.extractall(tmp_path, filter="data")
    contract = str(COPY.relative_to(ROOT))
    former, present = (json.loads((folder / contract).read_text("utf-8")) for folder in (tmp_path, ROOT))
    assert [*breaking_changes(former, present)] == []
    described = [*tmp_path.glob("[!p]*/**/*.binpb")]
    assert len(described) > 2
    buf = Path(sys.executable).with_name("buf")
    for file in described:
        command: list[str | Path] = [
            buf,
            "breaking",
            ROOT / file.relative_to(tmp_path),
            "--against",
            file,
            "--config",
            "buf.yaml",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
