"""The modules and commands of docs/workers.md do what the page shows."""

import json
from base64 import b64decode

from tests.e2e.conftest import ROOT, Postroom
from tests.support.console import Session, read_files, read_steps

PAGE = ROOT / "docs" / "workers.md"


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    text = PAGE.read_text("utf-8")
    files = read_files(text)
    for name, content in files.items():
        (postroom.folder / name).write_text(content)
    # A retry with full jitter may come at once, and then `--once` handles it, too.
    with (postroom.folder / "postroom.toml").open("a") as settings:
        settings.write('\n[policy]\nbackoff_base = "10m"\nbackoff_max = "1h"\n')
    steps = list(read_steps(text))
    session = Session(postroom.shell)
    for step in steps:
        session(step)
    assert len(steps) >= 5
    received = json.loads((postroom.folder / "received").read_text())
    assert b"o3" in b64decode(received["payload_b64"])
