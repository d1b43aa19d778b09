"""Methods without a docstring inherit one."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import postroom

ROOT = Path(postroom.__file__).parent
LAYERS = ("domain", "application", "projections", "adapters")


def bare_methods(path: Path) -> Iterator[tuple[str, str]]:
    """Yield class and name of the public methods of a module's public classes that have no docstring."""
    for kind in ast.parse(path.read_text()).body:
        if not isinstance(kind, ast.ClassDef) or kind.name.startswith("_"):
            continue
        for method in kind.body:
            if (
                isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                and not method.name.startswith("_")
                and ast.get_docstring(method) is None
                and not any(ast.unparse(each).endswith(".setter") for each in method.decorator_list)
            ):
                yield kind.name, method.name


def test_a_public_method_without_a_docstring_overrides_one_that_has_it() -> None:
    undocumented, found = [], 0
    for path in sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        if path.name.endswith("_pb2_grpc.py"):
            continue
        for kind, method in bare_methods(path):
            found += 1
            module = import_module(".".join(("postroom", *path.relative_to(ROOT).with_suffix("").parts)))
            if not inspect.getdoc(getattr(getattr(module, kind), method)):
                undocumented.append(f"{path.relative_to(ROOT)}: {kind}.{method}")
    assert found > 50, "the test reads methods without a docstring"
    assert undocumented == []
