"""Templates and static files of the console, loaded once."""

import gzip
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from postroom.adapters.console.sparklines import CHARTS
from postroom.adapters.console.values import FILTERS, finalize

ROOT: Final = Path(__file__).parent
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


_TEMPLATE: Final = re.compile(r"^\{# template: (\w+) #\}\n", re.MULTILINE)


def read_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a folder's files by their names.

    A file is one template, named like the file, or several, each below a line `{# template: NAME #}`, named
    `STEM/NAME`. Lines keep their numbers, which tracebacks show.
    """
    templates = {}
    for file in folder.iterdir():
        text = file.read_text()
        starts = list(_TEMPLATE.finditer(text))
        if not starts:
            templates[file.name] = text
        ends = [each.start() for each in starts[1:]] + [len(text)]
        for start, end in zip(starts, ends, strict=False):  # a file that is one template has no start
            blank = "{#" + "\n" * text.count("\n", 0, start.end()) + "#}"
            templates[f"{file.stem}/{start[1]}"] = blank + text[start.end() : end]
    return templates


class Templates:
    """The templates, which escape all text, including control and bidirectional characters.

    Arguments:
        facts: variables of all templates.
    """

    def __init__(self, static: "StaticFiles", **facts: Any) -> None:
        self._environment = Environment(
            loader=DictLoader(read_templates(ROOT / "templates")),
            autoescape=True,
            auto_reload=False,
            finalize=finalize,
            lstrip_blocks=True,
            trim_blocks=True,
            undefined=StrictUndefined,
        )
        self._environment.filters.update(FILTERS)
        self._environment.globals.update(CHARTS)
        self._environment.globals["static"] = static.name
        self._environment.globals.update(facts)
        self._environment.globals["ui"] = self._environment.get_template("macros.html").module

    def render(self, template: str, /, **facts: Any) -> str:
        """Return the text of a template."""
        return self._environment.get_template(template).render(facts)


class StaticFiles:
    """Style sheets and scripts, cached by browsers, as links to them contain their hash."""

    def __init__(self) -> None:
        self._files = {
            each.name: each.read_bytes() for each in (ROOT / "static").iterdir() if each.suffix in TYPES
        }
        self._compressed = {name: gzip.compress(data, mtime=0) for name, data in self._files.items()}
        self._hashes = {name: sha256(data).hexdigest()[:16] for name, data in self._files.items()}

    def name(self, name: str) -> str:
        """Return the path of a file below the console."""
        return f"/static/{name}?v={self._hashes[name]}"

    def serve(self, request: Request) -> Response:
        """Return a file, cacheable for a year."""
        name = request.path_params["name"]
        data = self._files.get(name)
        if data is None:
            headers = {"cache-control": "no-store"}
            return Response("This file does not exist.", 404, headers, "text/plain")
        headers = {"cache-control": "no-cache", "vary": "accept-encoding"}
        if request.query_params.get("v") == self._hashes[name]:
            headers["cache-control"] = "public, max-age=31536000, immutable"
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["content-encoding"] = self._compressed[name], "gzip"
        return Response(data, headers=headers | {"content-type": TYPES[Path(name).suffix]})
