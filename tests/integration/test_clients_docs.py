"""The programs of docs/clients.md print what the page says."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.servers.http import PostroomServer

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLE = re.compile(
    r"^```python\n((?:(?!```).*\n)*)```\n(?:(?!```).*\n)*?\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE
)


def test_the_programs_of_the_page_print_what_it_says(tmp_path: Path) -> None:
    examples = EXAMPLE.findall(PAGE.read_text("utf-8"))
    assert len(examples) == 5
    with PostroomServer(tmp_path / "server") as server:
        for program, output in examples:
            here = program.replace("http://127.0.0.1:8080", server.address)
            done = subprocess.run(
                [sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert (done.stdout, done.stderr) == (output, "")
