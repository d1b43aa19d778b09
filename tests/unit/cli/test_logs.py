"""Log lines: one shape for Postroom's events and the records of libraries."""

import io
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.cli.logs import LogFormat, configure_logs, make_formatter
from postroom.application.telemetry import logger
from postroom.application.tracing import correlate


def logged(log_format: LogFormat, log: Callable[[], object]) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make_formatter(log_format))
    logging.basicConfig(handlers=[handler], level=logging.DEBUG, force=True)
    log()
    return stream.getvalue()


def line(log: Callable[[], object]) -> dict[str, Any]:
    text = logged("json", log)
    assert text.isascii()
    assert text.count("\n") == 1
    fields: dict[str, Any] = json.loads(text)
    return fields


def test_an_event_is_a_line_of_json_with_time_level_logger_name_and_fields() -> None:
    with correlate("request-1"):
        fields = line(lambda: logger().info("mailbox.owned", mailbox="orders@one", epoch=3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields.pop("timestamp"))
    assert fields == {
        "level": "info",
        "logger": "postroom.mailbox",
        "event": "mailbox.owned",
        "mailbox": "orders@one",
        "epoch": 3,
        "corr_id": "request-1",
    }


def test_the_record_of_a_library_has_the_same_shape() -> None:
    fields = line(lambda: logging.getLogger("nats.aio").warning("lost %s after %d s", "one", 3))
    assert (fields["level"], fields["logger"]) == ("warning", "nats.aio")
    assert fields["event"] == "lost one after 3 s"


def test_a_field_can_not_replace_what_every_line_has() -> None:
    fields = line(lambda: logger().info("a.b", level="x", logger="x", timestamp="x", exc_info="x"))
    assert (fields["level"], fields["logger"], fields["event"]) == ("info", "postroom.a", "a.b")
    assert fields["timestamp"] != "x"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_has_no_local_variables(log_format: LogFormat) -> None:
    def fail(payload: str) -> None:
        try:
            raise ValueError(len(payload))
        except ValueError:
            logger().exception("a.failed")

    secret = os.urandom(7).hex()
    text = logged(log_format, lambda: fail(secret))
    assert "Traceback" in text
    assert "ValueError: 14" in text
    assert secret not in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_value_controls_the_terminal_or_begins_a_line(log_format: LogFormat) -> None:
    hostile = "\x1b[2J\n\u202eline\udcff"

    def fail() -> None:
        logging.getLogger("nats").warning(hostile)
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            logger().exception("a.failed", text=hostile)

    text = logged(log_format, fail)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.encode()
    assert not [each for each in text.splitlines() if each.startswith(("\u202e", "line"))]


def test_auto_is_json_unless_stderr_is_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info")
    logger().info("a.b")
    assert json.loads(capsys.readouterr().err)["event"] == "a.b"
    configure_logs("info", "console")
    logger().info("a.b", n=1)
    assert re.search(r"\[info +\] a\.b +\[postroom\.a\] n=1\n", capsys.readouterr().err)


def test_debugging_postroom_logs_no_details_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("debug", "json")
    logging.getLogger("nats").info("a detail")
    logger().debug("a.b")
    assert [json.loads(each)["logger"] for each in capsys.readouterr().err.splitlines()] == ["postroom.a"]


def test_the_example_in_the_documentation_renders_events_with_structlog(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parents[3] / "docs/observability.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    root = logging.getLogger()
    root.handlers.clear()
    exec(example, {})
    logger().warning("mailbox.owner_hangs", mailbox="orders@one")
    fields = json.loads(capsys.readouterr().err)
    assert (fields["event"], fields["mailbox"]) == ("mailbox.owner_hangs", "orders@one")
