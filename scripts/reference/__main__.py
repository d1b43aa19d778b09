"""Write the generated pages of docs/reference, or check that they are up to date.

python -m scripts.reference [--check]
"""

import subprocess
import sys
from pathlib import Path

from scripts.reference.api import make_api_pages
from scripts.reference.commands import make_commands_page
from scripts.reference.errors import make_error_pages
from scripts.reference.settings import make_settings_page

FOLDER = Path(__file__).parents[2] / "docs/reference"


def make_pages() -> dict[Path, str]:
    """Return all pages by file."""
    pages = {FOLDER / "commands.md": make_commands_page(), FOLDER / "settings.md": make_settings_page()}
    for folder, made in (("api", make_api_pages()), ("errors", make_error_pages())):
        pages |= {FOLDER / folder / name: text for name, text in made.items()}
    return {file: _format(file, text) if "```python" in text else text for file, text in pages.items()}


def _format(file: Path, text: str) -> str:
    """Return a page whose examples are formatted."""
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "format", "--quiet", "--stdin-filename", file, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the pages; with `--check`, end with 1 if one is not what would be written."""
    pages = make_pages()
    others = [
        file for folder in ("api", "errors") for file in (FOLDER / folder).glob("*.md") if file not in pages
    ]
    if "--check" in sys.argv:
        stale = [file for file in pages if not file.exists() or file.read_text() != pages[file]] + others
        if stale:
            names = ", ".join(str(file.relative_to(FOLDER.parents[1])) for file in stale[:5])
            sys.exit(f"{names}: not up to date; run `make operations`.")
        return
    for file in others:
        file.unlink()
    for file, text in pages.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
