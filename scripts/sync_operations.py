"""Write the operations of `SyncMailbox` from those of `Mailbox`, or check that they are up to date.

python scripts/sync_operations.py [--check]
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = ROOT / "application/operations/mailbox.py"
TARGET = PORT.with_name("sync_operations.py")
HEAD = '''"""Operations of a mailbox for code without an event loop; written by scripts/sync_operations.py."""

from __future__ import annotations

'''
BY_HAND = ("receive_messages",)
"""Operations whose results differ: `SyncMailbox` defines them."""


def make(source: str) -> str:
    """Return the module: the signatures and docstrings of the port's source, without coroutines."""
    module = ast.parse(source)
    port = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Mailbox")
    base = ast.parse(
        "class SyncOperations(ABC):\n"
        '    """The operations of `Mailbox` as functions that return when they are done."""\n'
        "    @property\n"
        "    @abstractmethod\n"
        "    def _open(self) -> Mailbox:\n"
        '        """Return the mailbox."""\n'
        "    @abstractmethod\n"
        "    def _run(self, work: Coroutine[Any, Any, T]) -> T:\n"
        '        """Return the result of a coroutine."""\n'
    ).body[0]
    assert isinstance(base, ast.ClassDef)
    for method in port.body:
        if isinstance(method, ast.AsyncFunctionDef) and method.name not in BY_HAND:
            base.body.append(_without_await(method))
    code = ast.unparse(base)
    return HEAD + _imports(module, code) + "\n\nT = TypeVar('T')\n\n" + code + "\n"


def _without_await(method: ast.AsyncFunctionDef) -> ast.FunctionDef:
    names = [each.arg for each in method.args.posonlyargs[1:]]
    names += [f"{each.arg}={each.arg}" for each in method.args.kwonlyargs]
    call = f"self._run(self._open.{method.name}({', '.join(names)}))"
    is_none = isinstance(method.returns, ast.Constant)
    body = [method.body[0], *ast.parse(call if is_none else f"return {call}").body]
    made = ast.FunctionDef(method.name, method.args, body, [], method.returns)
    return ast.fix_missing_locations(ast.copy_location(made, method))


def _imports(module: ast.Module, code: str) -> str:
    """Return the imports of the names that the code uses; those that the port defines come from it."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    lines = ["from abc import ABC, abstractmethod", "from collections.abc import Coroutine"]
    lines.append("from typing import Any, TypeVar")
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = sorted(each.name for each in node.names if (each.asname or each.name) in used)
            lines += [f"from {node.module} import {', '.join(names)}"] if names else []
    own = [node.targets[0] for node in module.body if isinstance(node, ast.Assign)]
    defined = sorted(
        {"Mailbox", *(each.id for each in own if isinstance(each, ast.Name) and each.id in used)}
    )
    lines.append(f"from postroom.application.operations.mailbox import {', '.join(defined)}")
    return "\n".join(lines)


def main() -> None:
    """Write the file; with `--check`, end with 1 if it is not what would be written."""
    ruff = Path(sys.executable).with_name("ruff")
    text = make(PORT.read_text())
    for arguments in (["check", "--fix", "--select", "I,F401,UP", "--quiet"], ["format", "--quiet"]):
        text = subprocess.run(
            [ruff, *arguments, "--stdin-filename", TARGET, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit(f"{TARGET.relative_to(ROOT)} is not up to date; run `make sync-operations`.")


if __name__ == "__main__":
    main()
