"""Blocks of code in the documentation: their names exist, and each is run by a test or listed as not run."""

import ast
import importlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from postroom.adapters.cli.main import build
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.streams import read_definitions
from postroom.adapters.compose.schedule import ScheduleSettings
from scripts.reference.settings import GROUPS, STRUCTS_BY_SECTION

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"adr", "reference"} & {*page.parts}),
]
"""All but decisions, which tell of their time, and the reference, which is written from the code."""
LANGUAGES = {"python", "console", "sh", "toml", "sql", "text", "json", "yaml", "http", "js"}
SERVERS = "tests/e2e/test_server_pages.py"
SPARK = "tests/e2e/test_spark_pages.py"
RUN = {
    "README.md": ("tests/e2e/test_readme.py", "python sh"),
    "docs/capabilities.md": ("tests/e2e/test_pages.py", "console"),
    "docs/capture.md": (SERVERS, "sh"),
    "docs/clickhouse.md": (SERVERS, "sh"),
    "docs/clients.md": ("tests/integration/test_clients_docs.py", "python text"),
    "docs/cloudevents.md": (SERVERS, "console"),
    "docs/cluster.md": (SERVERS, "python sh sql"),
    "docs/coming-from.md": (f"tests/e2e/test_pages.py {SERVERS}", "python console sql"),
    "docs/command-line.md": (f"tests/e2e/test_pages.py {SERVERS}", "toml console sh"),
    "docs/console.md": (SERVERS, "sh"),
    "docs/cookbook/databases.md": ("tests/e2e/test_cookbook.py", "python console"),
    "docs/cookbook/jobs.md": ("tests/e2e/test_cookbook.py", "python console"),
    "docs/cookbook/kubernetes.md": ("tests/e2e/test_cookbook.py", "console"),
    "docs/cookbook/web.md": ("tests/e2e/test_cookbook.py", "python console"),
    "docs/django.md": ("tests/e2e/test_django_docs.py", "python toml console"),
    "docs/erasure.md": ("tests/e2e/test_pages.py", "python console"),
    "docs/export.md": (f"tests/integration/test_export_docs.py {SERVERS}", "python console"),
    "docs/following.md": (SERVERS, "sh"),
    "docs/grpc.md": ("tests/integration/test_grpc_node.py", "js"),
    "docs/inbox.md": (f"tests/integration/test_inbox_docs.py {SERVERS}", "python sh sql"),
    "docs/installation.md": ("tests/e2e/test_pages.py", "console"),
    "docs/mcp.md": ("tests/e2e/mcp/test_docs.py", "python console sh"),
    "docs/namespaces.md": (f"tests/unit/config/test_namespaces.py {SERVERS}", "yaml sh"),
    "docs/observability.md": (f"tests/unit/cli/test_logs.py {SERVERS}", "python console sh"),
    "docs/operations.md": (f"tests/e2e/test_pages.py {SERVERS}", "console sh sql"),
    "docs/order.md": ("tests/e2e/test_ordered_keys.py", "python console"),
    "docs/outbox.md": (SERVERS, "python sh"),
    "docs/projections.md": (f"tests/projections/test_projection_docs.py {SERVERS}", "python sh sql"),
    "docs/reports.md": (f"tests/e2e/test_reports.py tests/e2e/test_pages.py {SPARK}", "python console sh"),
    "docs/schedules.md": ("tests/e2e/test_schedules_page.py", "python console"),
    "docs/service.md": (f"tests/integration/http_server/test_service_docs.py {SERVERS}", "console sh"),
    "docs/sources.md": (SERVERS, "sh"),
    "docs/spark.md": (SPARK, "sh"),
    "docs/spark-data.md": (f"tests/integration/spark/test_documentation.py {SPARK}", "python sh sql"),
    "docs/sqs.md": (f"tests/integration/sqs/test_messages_and_queues.py {SERVERS}", "python console sh"),
    "docs/subscriptions.md": ("tests/e2e/test_subscriptions_page.py", "python console"),
    "docs/tutorial.md": ("tests/e2e/test_tutorial.py", "console"),
    "docs/workers.md": ("tests/e2e/test_workers_docs.py", "python toml console"),
}
"""The tests that run the blocks of a page, and the languages of those that it runs."""
NOT_RUN: Mapping[str, Mapping[str, int]] = {
    "docs/coming-from.md": {"python": 4},  # Celery, RQ, Dramatiq and RabbitMQ, whose programs don't end
    "docs/command-line.md": {"sh": 1},  # an admin on three NATS servers; its tests have them
    "docs/cookbook/kubernetes.md": {"sh": 1},  # needs a cluster; the manifests are validated
    "docs/django.md": {"sh": 1},  # pip
    "docs/installation.md": {"sh": 1},  # pip
    "docs/operations.md": {"sh": 2},  # podman and docker; CI builds the image and starts the containers
    "docs/spark.md": {"sh": 5},  # a bundle and its cluster, as tests of clusters have; YARN and Kubernetes
}
"""Number of blocks that no test runs, by page and language; they are only compiled or parsed."""
DATA = {"text", "json", "yaml", "http", "toml"}
"""Languages of blocks that are no programs: what is not run of them need not be listed."""
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(postroom [^`]+)`")
_OPERATOR = re.compile(r"[();<>|&]+")


class Block(NamedTuple):
    """A block of code, and the line of its page at which it begins."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(file: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = file.read_text("utf-8")
    for match in _BLOCK.finditer(text):
        indent, language, code = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        yield Block(
            str(file.relative_to(ROOT)), line, language, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        )


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize a test with the blocks of some languages."""
    blocks = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", blocks, ids=str)


def test_every_block_names_its_language() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    fences = sum(len(re.findall(r"^ *```", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)


def test_every_block_is_run_by_a_test_or_is_listed_as_not_run() -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for block in BLOCKS:
        counts[block.page][block.language] += 1
    for page, (tests, languages) in RUN.items():
        for test in tests.split():
            assert Path(page).name in (ROOT / test).read_text("utf-8"), f"{test} does not read {page}"
        assert {*languages.split()} <= counts[page].keys(), page
    for page, found in counts.items():
        _, languages = RUN.get(page, ("", ""))
        listed = NOT_RUN.get(page, {})
        assert listed.keys() <= found.keys(), page
        for language, count in found.items():
            if language in languages.split():
                assert listed.get(language, 0) < count, f"{page} has no block of {language} that is run"
            elif language not in DATA:
                assert listed.get(language, 0) == count, f"{page}: list the {language} that is not run"
    assert (RUN.keys() | NOT_RUN.keys()) <= counts.keys()


@of("python")
def test_python_compiles_and_what_it_imports_from_postroom_exists(block: Block) -> None:
    compile(block.code, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "postroom":
            module = importlib.import_module(node.module or "")
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def read_commands(code: str, *, is_session: bool = False) -> Iterator[list[str]]:
    """Yield the words after `postroom` of each command of a block of the shell.

    Arguments:
        is_session: commands begin with `$ `; other lines are output.
    """
    for line in code.replace("\\\n", " ").splitlines():
        if is_session and not line.startswith("$ "):
            continue
        text = re.sub(r"(^|\s)# .*", "", line.removeprefix("$ "))
        lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not _OPERATOR.fullmatch(word):
                words.append(word)
                continue
            for number, each in enumerate(words):
                # after variables and words of the shell, or of another program that runs it
                if each.endswith("/bin/postroom") or (
                    each == "postroom" and all("=" in word or word in ("do", "$") for word in words[:number])
                ):
                    yield words[number + 1 :]
            words = []


SHELL = {
    f"{block}: {shlex.join(words)}": words
    for block in BLOCKS
    if block.language in ("console", "sh")
    for words in read_commands(block.code, is_session=block.language == "console")
}
INLINE = {
    f"{page.relative_to(ROOT)}: {span}": words
    for page in PAGES
    for span in _INLINE.findall(_BLOCK.sub("", page.read_text("utf-8")))
    for words in read_commands(" ".join(span.split()))
}


@pytest.mark.parametrize("words", SHELL.values(), ids=SHELL)
def test_a_command_of_a_block_has_valid_arguments(words: list[str]) -> None:
    command: Any = build()
    context = command.make_context("postroom", [*words])
    while rest := [*getattr(context, "_protected_args", ()), *context.args]:
        name, command, arguments = command.resolve_command(context, rest)
        context = command.make_context(name, arguments, parent=context)
    assert context.command_path != "postroom"


@pytest.mark.parametrize("words", INLINE.values(), ids=INLINE)
def test_a_command_of_a_sentence_and_its_options_exist(words: list[str]) -> None:
    command: Any = build()
    context = command.make_context("postroom", [], resilient_parsing=True)
    known = {"--help"}
    for word in ["", *words]:
        name = word.strip("[]").partition("=")[0]
        if name.startswith("--"):
            assert name in known
        elif name in getattr(command, "entries", ()):
            _, command, _ = command.resolve_command(context, [name])
            context = command.make_context(name, [], parent=context, resilient_parsing=True)
        elif name and getattr(command, "entries", None) and name.isalpha() and name.islower():
            assert command.default is not None, f"there is no command {name}"
        known |= {each for option in command.params for each in (*option.opts, *option.secondary_opts)}


@of("toml")
def test_settings_of_a_block_are_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "postroom.toml"
    file.write_text(block.code)
    settings = load_settings({}, {}, str(file))
    for name, values in settings.sections.items():
        if values and name not in GROUPS:
            settings.section(name, STRUCTS_BY_SECTION[name])
    if settings.sections["streams"] or settings.sections["consumers"]:
        read_definitions(settings)
    for schedule in settings.sections["schedules"].values():
        msgspec.convert(schedule, ScheduleSettings)
