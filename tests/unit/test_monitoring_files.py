"""Dashboard, alert rules and documentation against the metrics that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
GOLDEN = dict(
    line.split(maxsplit=1)
    for line in (ROOT / "tests" / "integration" / "metrics.txt").read_text("utf-8").splitlines()
)
_SERIES = re.compile(r"postroom_[a-z_]*[a-z]")
_ALERT = re.compile(r"- alert: (\w+)")


def metric_of(series: str) -> str:
    """Return the metric of a series; a histogram has three of them."""
    name = re.sub(r"_(bucket|count|sum)$", "", series)
    return name if GOLDEN.get(name, "").startswith("histogram") else series


@pytest.mark.parametrize("name", ["alerts.yaml", "dashboard.json", "../../docs/runbook.md"])
def test_every_metric_that_is_named_exists(name: str) -> None:
    named = {metric_of(each) for each in _SERIES.findall((MONITORING / name).read_text("utf-8"))}
    assert named
    assert named <= GOLDEN.keys()


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    assert GOLDEN.keys() - set(_SERIES.findall(text)) == set()


def test_every_alert_links_its_section_of_the_runbook() -> None:
    rules = (MONITORING / "alerts.yaml").read_text("utf-8")
    alerts = _ALERT.findall(rules)
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "runbook.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(alerts) == sorted(headings)
    base = '{{ or $externalLabels.docs_url "file:///usr/share/doc/postroom" }}/runbook.md#'
    links = re.findall(rf"runbook_url: '{re.escape(base)}(\w+)'$", rules, re.MULTILINE)
    assert links == [alert.lower() for alert in alerts]


def test_every_alert_is_tested_to_be_silent_to_fire_and_to_resolve() -> None:
    outcomes: dict[str, list[bool]] = {}
    for test in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text("utf-8"))["tests"]:
        for each in test["alert_rule_test"]:
            outcomes.setdefault(each["alertname"], []).append(bool(each.get("exp_alerts")))
    alerts = _ALERT.findall((MONITORING / "alerts.yaml").read_text("utf-8"))
    assert outcomes == {alert: [False, True, False] for alert in alerts}


def test_the_documented_token_of_prometheus_does_not_expire_within_a_day() -> None:
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    (command,) = re.findall(r"postroom token mint prometheus[^`\n]*", text)
    assert "--expires-in 366d" in command


def test_the_dashboard_has_panels_with_unique_ids_that_name_their_data_source() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)


@pytest.mark.parametrize(
    "arguments", [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]]
)
def test_the_alert_rules_pass_their_tests(arguments: list[str]) -> None:
    promtool = shutil.which("promtool", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run(
        [promtool, *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
