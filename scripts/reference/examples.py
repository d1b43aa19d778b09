"""Examples of public names: the shortest statement of the guides, or of the samples, that has the name."""

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache

from scripts.operations import ROOT

SAMPLES = (ROOT / "tests/typing/reference.py", ROOT / "tests/typing/api.py")
"""Samples that mypy checks."""
OTHERS = ROOT / "docs/coming-from.md"
"""Page with code of other systems, whose names may be those of ours."""
MAX_LINES = 12


def find_example(name: str) -> str | None:
    """Return the shortest example of a public name, or None."""
    candidates = [each for each in _statements() if re.search(rf"(?<![\w.]){name}\b", each)]
    calls = [each for each in candidates if re.search(rf"(?<![\w.])@?{name}\(", each)]
    return min(calls or candidates, key=len, default=None)


@cache
def _statements() -> tuple[str, ...]:
    """Return the statements of the samples and of the guides' blocks of Python."""
    sources = [each.read_text() for each in SAMPLES]
    for page in sorted({*(ROOT / "docs").glob("*.md")} - {OTHERS}):
        sources += re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return tuple(statement for source in sources for statement in _of(source))


def _of(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of Python's prompt, or with an ellipsis
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom):
            text = textwrap.dedent("\n".join(_lines(source, node)))
            if text.count("\n") < MAX_LINES:
                yield _without_assertion(node, text)


def _lines(source: str, node: ast.stmt) -> list[str]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return source.splitlines()[first - 1 : node.end_lineno]


def _without_assertion(node: ast.stmt, text: str) -> str:
    """Return `assert_type(value, kind)` of a sample as the value and a comment."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "assert_type":
        value, kind = call.args
        return f"{ast.unparse(value)}  # {ast.unparse(kind)}"
    return text
