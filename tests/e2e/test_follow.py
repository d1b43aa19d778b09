import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import SCRIPT, Postroom
from tests.projections import following
from tests.support.replaced_logs import cut


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, postroom: Postroom) -> str:
    """A store whose read models were built before there was anything in it, as a service would begin."""
    path = str(postroom.store)
    if request.param == "postgres":
        path = request.getfixturevalue("postgres_store")
    postroom.ok("send", "orders", "-", "--store", path, stdin=b"first")
    following.build(path)
    return path


def test_once_catches_up_and_the_status_tells_it(postroom: Postroom, store: str) -> None:
    before = postroom.ok("views", "status", "--store", store, "--json").json
    assert [lag["lag"] > 0 and lag["seconds"] > 0 for lag in before["lags"]] == [True]
    done = postroom.ok("views", "follow", "--once", "--store", store, "--json").json
    assert done["events"] == before["lags"][0]["lag"]
    after = postroom.ok("views", "status", "--store", store, "--json").json
    assert [(lag["lag"], lag["seconds"]) for lag in after["lags"]] == [(0, 0.0)]
    assert (after["parked"], after["is_following"]) == (0, False)
    assert len(postroom.ok("search", "--store", store, "--json").lines) == 1


def test_it_follows_serves_metrics_and_ends_on_sigterm(postroom: Postroom, store: str) -> None:
    command: list[str | Path] = [SCRIPT, "views", "follow", "--metrics-port", "0", "--store", store]
    with subprocess.Popen(
        command, env=postroom.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        found = re.match(r"Metrics at (http://\S+)\.", process.stderr.readline())
        assert found is not None
        postroom.ok("send", "orders", "-", "--store", store, stdin=b"second")
        while len(postroom("search", "--store", store, "--json").lines) < 2:  # none yet is an error
            pass
        request = urllib.request.Request(found[1], headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request) as answer:
            metrics = answer.read().decode()
        with urllib.request.urlopen(found[1]) as answer:
            text = answer.read().decode()
        assert postroom.ok("views", "status", "--store", store, "--json").json["is_following"]
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert re.search(r"in \d+ batch(es)? .* 0 parked", out)
    assert "# TYPE postroom_follow_events_total counter" in text
    assert metrics.endswith("# EOF\n")
    assert 'postroom_follow_lag_events{mailbox="main@local"} 0' in metrics
    assert re.search(r"^postroom_follow_events_total [1-9]", metrics, re.MULTILINE)


def test_without_read_models_it_says_what_to_do(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "-", stdin=b"first")
    done = postroom("views", "follow", "--once", "--json")
    assert done.code == 3
    assert "postroom views rebuild" in done.error["message"]


def test_a_log_that_was_replaced_ends_it_with_the_command_that_rebuilds(
    postroom: Postroom, store: str
) -> None:
    postroom.ok("views", "follow", "--once", "--store", store)
    cut(store, 0)
    postroom.ok("send", "orders", "-", "--store", store, stdin=b"other")
    done = postroom("views", "follow", "--once", "--store", store, "--json")
    assert done.code == 5
    assert "rebuild them with `postroom views rebuild`" in done.error["message"]
    status = postroom.ok("views", "status", "--store", store)
    assert "the log was replaced or cut since; rebuild with postroom views rebuild" in str(status)


def test_a_port_that_is_taken_is_refused_in_one_sentence(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "-", stdin=b"first")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = postroom("views", "follow", "--metrics-port", port, "--json")
    assert done.code == 4
    assert f"127.0.0.1:{port}" in done.error["message"]
