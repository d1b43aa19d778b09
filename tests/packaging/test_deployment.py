"""The files of `deploy/` are valid, agree with the commands, and grant nothing that they need not."""

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from configparser import RawConfigParser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from postroom.adapters.cli.main import build
from postroom.adapters.cli.restrictions import AccessSection
from postroom.adapters.cli.serve import DEFAULT_HTTP, ServeSettings
from postroom.adapters.cli.settings import load_settings
from tests.packaging.conftest import ROOT, TIMEOUT_SECONDS
from tests.packaging.environments import Environment

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/postroom/bin/postroom"
LONG_RUNNING = {
    "serve",
    "admin",
    "proxy",
    "views follow",
    "ingest",
    "work",
    "schedule",
    "outbox relay",
    "outbox capture",
    "inbox consume",
    "runner",
}
MAX_EXPOSURE = 20
"""Tenths of what `systemd-analyze security` calls the exposure level, of 100."""
REQUIREMENT = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


def section(unit: Path, name: str) -> dict[str, str]:
    """Return a section of a unit; of a repeated key the last value."""
    parser = RawConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read(unit)
    return dict(parser[name])


def command(unit: Path) -> str:
    """Return the command that a unit runs, without its arguments."""
    words = section(unit, "Service")["ExecStart"].split()
    assert words[:3] == [PROGRAM, "--config", "/etc/postroom/postroom.toml"]
    path: list[str] = []
    found = build()
    for word in words[3:]:
        commands = found.list_commands(typer.Context(found)) if hasattr(found, "list_commands") else ()
        if word not in commands:
            break
        found, path = found.get_command(typer.Context(found), word), [*path, word]
    options = {name for each in found.params for name in each.opts}
    assert {each for each in words[3 + len(path) :] if each.startswith("--")} <= options
    return " ".join(path)


def test_each_long_running_command_has_a_unit() -> None:
    assert {command(unit) for unit in UNITS} == LONG_RUNNING
    assert len(UNITS) == len(LONG_RUNNING)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_hardened_reloads_and_stops_later_than_its_command(unit: Path) -> None:
    service = section(unit, "Service")
    required = {
        "Type": "notify",
        "User": "postroom",
        "UMask": "0077",
        "StateDirectory": "postroom",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "LimitCORE": "0",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2 5",
        "ExecReload": "/bin/kill -HUP $MAINPID",
    }
    assert {name: service.get(name) for name in required} == required
    graceful = {"work": 30, "inbox consume": 60}.get(command(unit), 10)
    assert int(service["TimeoutStopSec"]) > graceful
    if command(unit) != "work":  # whose handlers are the user's code
        assert service["MemoryDenyWriteExecute"] == "yes"
        assert "Environment=POLARS_SKIP_CPU_CHECK=1" in unit.read_text()  # else Polars can't be imported then


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_and_calls_their_exposure_low(tmp_path: Path) -> None:
    copies = []
    for unit in UNITS:
        copies.append(tmp_path / unit.name)
        text = unit.read_text().replace(PROGRAM, str(Path(sys.executable).with_name("postroom")))
        copies[-1].write_text(text)
    for options in (("verify", "--man=no"), ("security", "--offline=yes", f"--threshold={MAX_EXPOSURE}")):
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", *options, *copies],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-500:] + done.stderr
        assert str(tmp_path) not in done.stderr  # a warning names the unit's path and line


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile: name and arguments, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_built_in_stages_from_a_plain_image_name_and_runs_as_an_ordinary_user() -> None:
    steps = instructions()
    names = {name for name, _ in steps}
    assert names <= {
        *("ARG", "FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "STOPSIGNAL"),
        *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    assert ("ARG", "PYTHON=python:3.13-slim") in steps
    assert [each for each in steps if each[0] == "FROM"] == [
        ("FROM", "${PYTHON} AS build"),
        ("FROM", "${PYTHON}"),
    ]
    last = steps[len(steps) - 1 - [name for name, _ in reversed(steps)].index("FROM") :]
    users = [arguments for name, arguments in last if name == "USER"]
    assert users == ["10001:10001"]
    after = [name for name, _ in last[last.index(("USER", users[0])) :]]
    assert not {"RUN", "COPY"} & set(after)  # nothing that the user owns can be changed in the image
    assert "://" not in (DEPLOY / "Containerfile").read_text().replace("http://127.0.0.1", "")


def test_the_image_starts_a_command_and_is_asked_for_its_health() -> None:
    steps = dict(instructions())
    assert json.loads(steps["ENTRYPOINT"]) == ["postroom"]
    assert json.loads(steps["CMD"]) == ["serve"]
    assert json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])[-1] == "/opt/postroom/healthcheck.py"
    assert steps["STOPSIGNAL"] == "SIGTERM"


def test_what_the_image_copies_exists_and_is_all_of_the_package() -> None:
    copied = [
        source
        for name, arguments in instructions()
        if name == "COPY" and not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    ]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"postroom", "domain", "application", "projections", "adapters", "pyproject.toml"} <= set(copied)


def test_the_image_installs_only_pinned_packages_by_hash() -> None:
    pip = [arguments for name, arguments in instructions() if name == "RUN" and "pip install" in arguments]
    assert "--require-hashes" in pip[0]
    assert "--requirement /build/requirements/container.txt" in pip[0]
    assert "--no-deps --no-build-isolation /build" in pip[1]
    container = (ROOT / "requirements/container.txt").read_text()
    pins = dict(REQUIREMENT.findall(container))
    assert pins.items() <= dict(REQUIREMENT.findall((ROOT / "requirements/lock.txt").read_text())).items()
    assert {"uvicorn", "grpcio", "psycopg", "nats-py", "aiohttp", "hatchling"} <= pins.keys()
    assert "pyspark" not in pins
    for requirement in re.split(r"^(?=[a-z])", container, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in requirement


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def test_the_health_check_follows_the_status_of_the_server() -> None:
    def check(url: str) -> int:
        return subprocess.run(
            [sys.executable, DEPLOY / "healthcheck.py"],
            env={"HEALTH_URL": url},
            capture_output=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        ).returncode

    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert check(f"{url}/healthz") == 0
        assert check(f"{url}/readyz") == 1
        server.shutdown()
    assert check(f"{url}/healthz") == 1


STEPS = re.findall(
    r"^(?:install|python3|runuser|systemctl|/opt/).*",
    (ROOT / "docs" / "operations.md").read_text(),
    re.MULTILINE,
)
"""Commands of the page on operations that install the units."""
EXIT_SECONDS = 120


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> "Machine":
    """A machine on which the steps of the page were taken, in folders of its own."""
    (extras,) = re.findall(r"pip install 'postroom\[([a-z,]+)\]'", "\n".join(STEPS))
    machine = Machine(tmp_path_factory.mktemp("machine"), wheel, set(extras.split(",")))
    for step in STEPS:
        if step.startswith("runuser -u postroom -- "):
            code, err = machine.run(step.removeprefix("runuser -u postroom -- "))
            assert code == 0, err
    return machine


class Machine:
    def __init__(self, folder: Path, wheel: Path, extras: set[str]) -> None:
        self.folder = folder
        self._environment = Environment(folder / "venv", wheel, extras)
        (folder / "state").mkdir()
        text = (DEPLOY / "postroom.toml").read_text().replace("/var/lib/postroom", str(folder / "state"))
        (folder / "postroom.toml").write_text(re.sub(r"127\.0\.0\.1:8080", "127.0.0.1:0", text))

    def run(self, command: str, **variables: str) -> tuple[int | None, str]:
        """Run a command as systemd does; return its exit code, None if it was ready, and what it logged.

        Arguments:
            variables: further environment variables.
        """
        command = command.replace("/opt/postroom", str(self.folder / "venv"))
        command = command.replace("/etc/postroom", str(self.folder))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            address = f"\0postroom-test-{os.getpid()}-{secrets.token_hex(8)}"
            manager.bind(address)
            manager.settimeout(0.05)
            process = subprocess.Popen(
                command.split(),
                cwd=self.folder / "state",
                env={
                    "PATH": os.defpath,
                    "HOME": str(self.folder),
                    "LANG": "C.UTF-8",
                    "NOTIFY_SOCKET": f"@{address[1:]}",
                    **variables,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            is_ready = False
            while not is_ready and process.poll() is None:
                with suppress(TimeoutError):
                    is_ready = b"READY=1" in manager.recv(4_096)
            process.terminate()
            out, _ = process.communicate(timeout=EXIT_SECONDS)
        return None if is_ready else process.returncode, out


def test_the_steps_of_installation_name_files_of_the_repository_and_the_extras_of_the_image() -> None:
    sources = [step.partition(" && ")[0].split()[-2] for step in STEPS if " deploy/" in step]
    assert sources
    assert all(list(ROOT.glob(source)) for source in sources)
    (extras,) = re.findall(r"postroom\[([a-z,]+)\]", "\n".join(STEPS))
    (container,) = re.findall(r"foreach each,([a-z ]+),", (ROOT / "Makefile").read_text())
    assert extras.split(",") == container.split()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_on_a_fresh_machine_or_names_the_setting_that_it_needs(
    machine: Machine, unit: Path
) -> None:
    start = section(unit, "Service")["ExecStart"].replace("%I", "shop:worker").replace("%i", "acme")
    code, err = machine.run(start)
    if command(unit) in ("serve", "views follow"):
        assert code is None, err
    else:
        assert code == 2, err
        assert re.search(r"set|add|named|can't be|required field", err), err
    assert "Traceback" not in err


def services() -> dict[str, Any]:
    """Return the services of the file for Compose."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return services


def test_the_containers_have_no_privileges_and_only_this_machine_reaches_them() -> None:
    for service in services().values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & service.keys()
        if service["image"] == "postroom":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges"]
        assert not re.search("://[^ ]*:[^ ]*@", str(service))  # no password in an address


def test_one_service_builds_the_image_as_two_that_write_its_tag_at_once_can_fail() -> None:
    own = [each for each in services().values() if each["image"] == "postroom"]
    (built,) = (each["build"] for each in own if "build" in each)
    assert (DEPLOY / built["context"] / built["dockerfile"]).is_file()
    assert all(each["pull_policy"] == "never" for each in own if "build" not in each)


def test_the_containers_of_ci_start_in_a_folder_that_their_user_can_read() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["container"]["steps"]]
    started = [shlex.split(each.partition("&& ")[2]) for each in commands if "docker run" in each]
    assert started
    for words in started:  # the working directory of the image is closed to other users
        mounted = words[words.index("--volume") + 1].partition(":")[2]
        assert "--user" not in words or words[words.index("--workdir") + 1] == mounted


def test_the_commands_of_the_containers_run_in_their_order_on_a_new_database(
    machine: Machine, empty_database: str
) -> None:
    own = {name: each for name, each in services().items() if each["image"] == "postroom"}
    assert own["postroom"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert all(each["environment"].keys() == {"POSTROOM_STORE", "PGPASSWORD"} for each in own.values())
    assert machine.run("/opt/postroom/bin/postroom init .")[0] == 0
    for name, arguments, code in (("migrate", (), 0), ("postroom", ("--http", "127.0.0.1:0"), None)):
        command = shlex.join(["/opt/postroom/bin/postroom", *own[name]["command"], *arguments])
        done, printed = machine.run(command, POSTROOM_STORE=empty_database)
        assert done == code, printed
    assert "worker app:worker, console." in printed
    assert DEFAULT_HTTP in (DEPLOY / "healthcheck.py").read_text()


KUBERNETES = DEPLOY / "kubernetes"


def manifests() -> list[dict[str, Any]]:
    """Return the objects of deploy/kubernetes, but for the file of kustomize."""
    files = sorted(each for each in KUBERNETES.glob("*.yaml") if each.name != "kustomization.yaml")
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [each.name for each in files]
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def pods() -> list[dict[str, Any]]:
    """Return the pods that the manifests describe."""
    return [each["spec"]["template"]["spec"] for each in manifests() if "template" in each.get("spec", ())]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifests_are_valid_in_kubernetes(version: str) -> None:
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_commands_and_settings_of_the_manifests_are_valid(tmp_path: Path) -> None:
    commands = [each for pod in pods() for each in pod["containers"]]
    assert len(commands) == 3
    for each in commands:
        context = build().make_context("postroom", [*each["args"]], resilient_parsing=False)
        while rest := [*getattr(context, "_protected_args", ()), *context.args]:
            name, found, arguments = context.command.resolve_command(context, rest)
            context = found.make_context(name, arguments, parent=context)
    settings = next(each["data"] for each in manifests() if each["kind"] == "ConfigMap")
    (tmp_path / "postroom.toml").write_text(settings["postroom.toml"])
    loaded = load_settings({}, {}, str(tmp_path / "postroom.toml"))
    assert loaded.section("serve", ServeSettings).behind_proxy
    assert loaded.section("access", AccessSection).key_file == "/run/postroom/keys"


def test_the_pods_have_no_privileges_and_only_memory_and_empty_folders_to_write_to() -> None:
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        for each in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert each["resources"]["limits"]["memory"]
        for volume in pod.get("volumes", ()):
            assert {"configMap", "secret", "emptyDir"} & volume.keys()
    text = "".join(file.read_text() for file in KUBERNETES.glob("*.yaml"))
    assert "postgresql://" not in text  # addresses have passwords, and are in the secret
