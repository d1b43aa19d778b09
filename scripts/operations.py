"""Write what the repository has of the table of operations as files, or check that they are up to date.

These are the operations of `SyncMailbox`, and the page of the reference.

python scripts/operations.py [--check]
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.operations import method_name
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.operations.operation import Operation
from postroom.domain.arguments import MAX_INT

ROOT = Path(__file__).parents[1]
PORT = ROOT / "application/operations/mailbox.py"
TARGET = PORT.with_name("sync_operations.py")
PAGE = ROOT / "docs/reference/operations.md"
PAGE_HEAD = """# Operations of a mailbox

Written by `make operations` from `application/operations/mailbox.py`. A capability needs the right of an
operation for its topic ([capabilities](../capabilities.md)). Clients repeat an operation whose outcome is
unknown, unless the page says that they do not. Arguments before `/` are positional, those after `*` are
keywords; `SyncMailbox` has the same operations for code without an event loop. All of them raise
`InvalidRequest`, `Saturated` and `Unavailable`.
"""
HEAD = '''"""Operations of a mailbox for code without an event loop; written by scripts/operations.py."""

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


def make_page() -> str:
    """Return the page of the reference."""
    return PAGE_HEAD + "".join(map(_section, OPERATIONS.values()))


def _section(operation: Operation) -> str:
    parameters = list(inspect.signature(operation.method).parameters.values())[1:]
    shown = inspect.Signature([each.replace(annotation=each.empty) for each in parameters])
    text, meanings = read_docstring(inspect.getdoc(operation.method) or "")
    method = METHODS.get(method_name(operation))
    calls = [f"Right `{operation.right.value}`", f"HTTP `{operation.verb} {operation.path}`"]
    calls += [] if method is None else [f"gRPC `{method.path.rpartition('/')[2]}`"]
    calls += [] if operation.is_repeatable else ["not repeated by clients"]
    lines = [f"\n## {operation.name}\n", f"`{operation.name}{shown}`\n", f"{'; '.join(calls)}.\n", text]
    if operation.parameters:
        lines += ["", "| argument | over HTTP | type and bounds | meaning |", "|---|---|---|---|"]
    for each in operation.parameters:
        name = f"`{each.sent_as}`" if each.is_sent else "entered by the server"
        lines.append(
            f"| `{each.name}` | {name} | {describe_type(each.type)} | {meanings.get(each.name, '')} |"
        )
    return "\n".join(lines) + "\n"


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring without its arguments, and the meanings of these."""
    before, _, after = docstring.partition("\nArguments:\n")
    listed, _, rest = after.partition("\n\n")
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", listed):
        names, _, meaning = entry.partition(": ")
        meanings |= dict.fromkeys(names.replace("*", "").strip().split(", "), " ".join(meaning.split()))
    paragraphs = [re.sub(r"\n+(?=Raises|Returns)", "\n\n", each) for each in (before.rstrip(), rest.rstrip())]
    return re.sub(r"\n +", "\n", "\n\n".join(filter(None, paragraphs))), meanings


def describe_type(type_: Any) -> str:
    """Return the type of an argument and its bounds as words."""
    arguments = get_args(type_)
    if get_origin(type_) is Annotated:
        meta = [each for each in arguments[1:] if isinstance(each, msgspec.Meta)]
        return ", ".join([describe_type(arguments[0]), *(words for each in meta for words in _bounds(each))])
    if get_origin(type_) in (Union, UnionType):
        others = [describe_type(each) for each in arguments if each is not NoneType]
        return " or ".join([*others, "None"] if NoneType in arguments else others)
    if get_origin(type_) is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if get_origin(type_) is Sequence:
        return f"list of {describe_type(arguments[0])}"
    return f"`{type_.__name__}`" if isinstance(type_, type) else "mapping"


def _bounds(meta: msgspec.Meta) -> Iterator[str]:
    if meta.ge is not None and meta.le not in (None, MAX_INT):
        yield f"{meta.ge:,} to {meta.le:,}"
    elif meta.ge is not None:
        yield f"at least {meta.ge}"
    if meta.max_length is not None:
        yield f"{meta.min_length or 0} to {meta.max_length} characters"


def main() -> None:
    """Write the files; with `--check`, end with 1 if one is not what would be written."""
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
    for file, content in ((TARGET, text), (PAGE, make_page())):
        if "--check" not in sys.argv:
            file.write_text(content)
        elif not file.exists() or file.read_text() != content:
            sys.exit(f"{file.relative_to(ROOT)} is not up to date; run `make operations`.")


if __name__ == "__main__":
    main()
