"""The base install is a SQLite mailbox and the command line; a missing extra is named by the error."""

import ast
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import PathDistribution, packages_distributions
from pathlib import Path
from zipfile import Path as ZipPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from postroom.application.extras import EXTRAS
from tests.packaging.conftest import ROOT
from tests.packaging.environments import Environment, requirements_of

Install = Callable[..., Environment]

TRY_EVERY_NAME = """
import json, postroom
missing = {}
for name in postroom.__all__:
    try:
        getattr(postroom, name)
    except postroom.MissingExtra as error:
        missing[name] = str(error)
print(json.dumps(missing))
"""


@pytest.fixture(scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Return the environment with the wheel and some extras, and a store; each is made once."""
    made: dict[tuple[str, ...], Environment] = {}

    def install(*extras: str) -> Environment:
        if extras not in made:
            base = install() if extras else None
            made[extras] = Environment(tmp_path_factory.mktemp("extras"), wheel, set(extras), base)
            made[extras].output("postroom", "send", "orders", "hello")
        return made[extras]

    return install


def test_the_base_install_requires_eight_packages(wheel: Path) -> None:
    base = [Requirement(each) for each in requirements_of(wheel) if "extra ==" not in each]
    assert {each.name for each in base} == {
        "blake3",
        "msgspec",
        "protobuf",
        "rich",
        "structlog",
        "typer",
        "uuid-utils",
        "zstandard",
    }
    assert [each for each in base if "<" in str(each.specifier)] == []


def test_the_base_install_sends_receives_and_settles_messages(install: Install) -> None:
    base = install()
    id_ = base.output("postroom", "send", "offers", "hello").strip()
    (message,) = map(json.loads, base.output("postroom", "--json", "recv", "offers").splitlines())
    assert message["message_id"] == id_
    base.output("postroom", "ack", message["receipt"])
    base.output("postroom", "show", id_)
    base.output("postroom", "verify")


def test_in_the_base_install_a_public_name_is_there_or_its_extra_is_named(install: Install) -> None:
    missing = json.loads(install().output("python", "-c", TRY_EVERY_NAME))
    assert {"Outbox", "open_relay", "open_worker", "load_namespaces", "EventProjection"} <= missing.keys()
    assert missing.keys().isdisjoint({"NewMessage", "open_mailbox", "read_mailbox", "TopicPolicy"})
    assert all("run: pip install 'postroom[" in text for text in missing.values()), missing


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("with postroom.read_projections('postroom.db'): pass", "views"),
        ("postroom.list_mailboxes('postgresql://shop@127.0.0.1:1/shop')", "postgres"),
        ("asyncio.run(enter(postroom.open_mailbox('postgresql://shop@127.0.0.1:1/shop')))", "postgres"),
        ("asyncio.run(enter(postroom.open_mailbox('archived.db', archive='segments')))", "archive"),
        ("postroom.connect('grpc://127.0.0.1:1').sync()", "grpc"),
        ("postroom.connect('http://127.0.0.1:1').sync()", "http"),
        ("asyncio.run(enter(postroom.open_streams(postroom.NatsSettings())))", "nats"),
    ],
)
def test_a_call_without_its_extra_names_it(install: Install, call: str, extra: str) -> None:
    environment = install()
    program = f"""
import asyncio, postroom

async def enter(context):
    async with context:
        pass

try:
    {call}
except postroom.MissingExtra as error:
    print(error)
"""
    assert f"run: pip install 'postroom[{extra}]'." in environment.output("python", "-c", program)


@pytest.mark.parametrize("extra", ["http", "namespaces", "nats", "postgres", "redis", "views"])
def test_with_an_extra_no_public_name_asks_for_it(install: Install, extra: str) -> None:
    missing = json.loads(install(extra).output("python", "-c", TRY_EVERY_NAME))
    assert [name for name, text in missing.items() if f"postroom[{extra}]" in text] == []


@pytest.mark.parametrize(
    ("extras", "command", "extra"),
    [
        ([], ["search"], "views"),
        ([], ["views", "rebuild"], "views"),
        ([], ["views", "follow"], "views"),
        ([], ["views", "verify"], "views"),
        ([], ["views", "rebuild", "--engine", "spark"], "spark"),
        (["views"], ["report", "traffic"], "reports"),
        ([], ["--store", "postgresql://shop@127.0.0.1:1/shop", "backlog"], "postgres"),
        ([], ["--store", "postgresql://shop@127.0.0.1:1/shop", "migrate"], "postgres"),
        ([], ["streams", "list"], "nats"),
        ([], ["search", "--from", "chdb:read-models"], "clickhouse"),
        ([], ["console"], "console"),
        ([], ["mcp"], "mcp"),
        ([], ["up"], "up"),
        ([], ["ingest", "--subject", "orders.>", "--durable", "archive"], "nats"),
        ([], ["ingest", "--url", "kafka://127.0.0.1:1", "--subject", "a", "--durable", "b"], "kafka"),
        ([], ["ingest", "--url", "amqp://127.0.0.1:1", "--subject", "a", "--durable", "b"], "rabbitmq"),
        ([], ["ingest", "--url", "redis://127.0.0.1:1", "--subject", "a", "--durable", "b"], "redis"),
        ([], ["inbox", "consume"], "http,nats,postgres"),
        ([], ["outbox", "relay"], "nats,postgres"),
    ],
    ids=lambda value: "+".join(value) or "base" if isinstance(value, list) else value,
)
def test_a_command_without_its_extra_names_it(
    install: Install, extras: list[str], command: list[str], extra: str
) -> None:
    environment = install(*extras)
    done = environment.run("postroom", *command)
    assert done.returncode == 1, done
    assert f"run: pip install 'postroom[{extra}]'." in done.stderr
    assert done.stderr.splitlines()[-1].startswith("postroom: This needs the package ")
    assert "Traceback" not in done.stderr


def test_with_views_alone_the_command_that_a_search_hints_builds_what_it_searches(install: Install) -> None:
    environment = install("views")
    environment.output("postroom", "send", "orders", "again")
    refused = environment.run("postroom", "search")
    assert refused.returncode == 3
    (hint,) = re.findall(r"`(postroom [^`]+)`", refused.stderr)
    built = json.loads(environment.output(*hint.split(), "--json"))
    assert built["computed_by"] == {"engine": "local", "reason": "pyspark is not installed"}
    assert len(environment.output("postroom", "--json", "search").splitlines()) == 2


BUILD_EVERY_COMMAND = """
from postroom.adapters.cli.main import build

def build_all(command):
    for name in getattr(command, "entries", ()):
        build_all(command.get_command(None, name))

build_all(build())
"""


def test_the_base_install_has_the_help_of_every_command_and_shows_settings(install: Install) -> None:
    base = install()
    base.output("python", "-c", BUILD_EVERY_COMMAND)
    assert "visibility" in base.output("postroom", "config", "show", "policy")


def test_ingestion_from_redis_needs_only_its_extra(install: Install) -> None:
    redis = install("redis")
    (redis.folder / "namespaces.yaml").write_text("""
namespaces:
  - name: shop
    pattern: mailbox
    slots:
      message_source:
        backend: redis
        config: {url: "redis://127.0.0.1:1", stream: shop.events, consumer_group: archive}
      storage:
        backend: sqlite
        config: {database_path: shop.db}
""")
    done = redis.run("postroom", "ingest", "--config", "namespaces.yaml", "--once")
    assert (done.returncode, "connecting to 127.0.0.1:1" in done.stderr) == (4, True), done


def third_party_imports() -> dict[str, set[str]]:
    """Return the top-level modules of others that the product imports, and where."""
    found: dict[str, set[str]] = {}
    for layer in ("postroom", "domain", "application", "projections", "adapters"):
        for file in (ROOT / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                for name in {each.partition(".")[0] for each in names} - sys.stdlib_module_names:
                    found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    found.pop("postroom")
    return found


def test_every_import_of_the_product_is_installed_by_the_base_or_by_the_extra_that_errors_name(
    wheel: Path,
) -> None:
    distributions = packages_distributions()
    for module, files in third_party_imports().items():
        names = {canonicalize_name(name) for name in distributions[module]}
        extra = EXTRAS.get(module, "")
        assert names & required(wheel, extra), f"{sorted(files)} import {module}, which extra {extra!r} lacks"


def required(wheel: Path, extra: str) -> set[str]:
    """Return the packages that the wheel requires with an extra, by name."""
    names: set[str] = set()
    for each in map(Requirement, requirements_of(wheel)):
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            names |= (
                {canonicalize_name(each.name)}
                if each.name != "postroom"
                else set().union(*(required(wheel, included) for included in each.extras))
            )
    return names


def test_every_extra_that_documentation_and_errors_name_exists(wheel: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for layer in ("application", "projections", "adapters"):
        pages += (ROOT / layer).rglob("*.py")
    named = {
        extra.strip()
        for page in pages
        for names in re.findall(r"postroom\[([a-z, ]+)\]", page.read_text("utf-8"))
        for extra in names.split(",")
    }
    (info,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    provided = set(PathDistribution(info).metadata.get_all("Provides-Extra") or [])
    assert named | set(EXTRAS.values()) <= provided
    assert {"postgres", "nats", "http", "views", "spark", "all"} <= provided


@pytest.mark.parametrize(
    ("extras", "names"),
    [
        (("nats", "postgres"), ["open_relay", "open_outbox", "open_streams", "Outbox", "transaction"]),
        (("http", "nats", "postgres"), ["open_worker", "open_dead_letters", "verify_signature"]),
        (("nats",), ["open_ingester"]),
        (("views",), ["open_follower", "export_messages", "EventProjection"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_the_documented_extras_are_enough(
    install: Install, extras: tuple[str, ...], names: list[str]
) -> None:
    missing = json.loads(install(*extras).output("python", "-c", TRY_EVERY_NAME))
    assert {name: missing[name] for name in names if name in missing} == {}


def test_pytest_finds_the_mailbox_in_memory_and_imports_nothing_before_it_is_used(install: Install) -> None:
    environment = install("testing")
    (environment.folder / "test_shop.py").write_text(
        "import sys\n\nimport pytest\n\n\n"
        "def test_nothing_is_imported():\n"
        "    assert not [name for name in sys.modules if name.startswith('postroom.application')]\n\n\n"
        "@pytest.mark.asyncio\n"
        "async def test_send(memory_mailbox):\n"
        "    assert await memory_mailbox.receive_messages('orders') == []\n"
    )
    assert "2 passed" in environment.output(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"
    )
