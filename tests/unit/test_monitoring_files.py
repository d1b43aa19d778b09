"""Dashboard, alert rules and documentation against the metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
    links = re.findall(r"runbook_url: docs/runbook\.md#(\w+)$", rules, re.MULTILINE)
    assert links == [alert.lower() for alert in alerts]


def test_the_dashboard_has_panels_with_unique_ids_that_name_their_data_source() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)


@pytest.mark.parametrize(
    "arguments", [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]]
)
def test_the_alert_rules_pass_their_tests(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run(
        [promtool, *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
