"""Log lines: one shape for Postroom's events and the records of libraries."""

import io
import json
import logging
import logging.config
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from postroom.adapters.cli.logs import (
    LogFormat,
    configure_logs,
    log_application,
    make_formatter,
    read_levels,
)
from postroom.application.telemetry import EventLogger, logger
from postroom.application.tracing import correlate
from tests.support.logs import capture_logs


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


def test_the_line_of_an_application_has_its_extra_and_the_context_of_structlog() -> None:
    with structlog.contextvars.bound_contextvars(message_id="m-1", attempt=2):
        fields = line(
            lambda: logging.getLogger("shop").info("charged %s", "o1", extra={"total": 3, "level": "x"})
        )
    assert fields.pop("timestamp")
    assert fields == {
        "level": "info",
        "logger": "shop",
        "event": "charged o1",
        "message_id": "m-1",
        "attempt": 2,
        "total": 3,
    }


def test_the_lines_of_an_application_by_structlog_and_logging_look_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("warning", "json")
    try:
        log_application("shop.tasks", "warning")
        with structlog.contextvars.bound_contextvars(message_id="m-1"):
            structlog.get_logger("shop.tasks").info("charged", total=3, timestamp="x")
            structlog.get_logger("shop.tasks").debug("a detail")
            logging.getLogger("shop.tasks").info("charged", extra={"total": 3})
            try:
                raise ValueError("no total")
            except ValueError:
                structlog.get_logger("shop.tasks").exception("failed")
    finally:
        structlog.reset_defaults()
        logging.getLogger("shop").setLevel(logging.NOTSET)
    *lines, failed = map(json.loads, capsys.readouterr().err.splitlines())
    for each in lines:
        assert each.pop("timestamp") != "x"
        assert each == {
            "level": "info",
            "logger": "shop.tasks",
            "event": "charged",
            "message_id": "m-1",
            "total": 3,
        }
    assert len(lines) == 2
    assert (failed["level"], failed["event"], failed["message_id"]) == ("error", "failed", "m-1")
    assert "ValueError: no total" in failed["exception"]


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"postroom": "info"}),
        ("error, shop=debug,nats.aio=info", {"postroom": "error", "shop": "debug", "nats.aio": "info"}),
        ("shop=debug", {"shop": "debug"}),
        ("", None),
        ("loud", None),
        ("=info", None),
        ("shop=", None),
        ("info,info", None),
        ("shop=info,shop=debug", None),
        ("info,", None),
    ],
)
def test_levels_are_of_postroom_or_of_the_loggers_that_are_named(
    text: str, levels: dict[str, str] | None
) -> None:
    assert read_levels(text) == levels


def test_the_level_of_each_logger_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("shop=debug", "json")
    logging.getLogger("shop.tasks").debug("one")
    logger().info("a.b")
    configure_logs("info", "json")
    logging.getLogger("shop").setLevel(logging.NOTSET)
    logger().info("a.c")
    assert [json.loads(each)["event"] for each in capsys.readouterr().err.splitlines()] == ["one", "a.c"]


def test_a_problem_that_lasts_is_logged_at_once_and_every_five_minutes_with_its_repeats() -> None:
    now = 0.0
    log = EventLogger(lambda: now)
    with capture_logs() as events:
        for at in (*range(0, 302, 2), 400, 401):
            now = at
            log.retry("store.failed", error="no disk", pause_ms=at)
        log.retry("store.failed", error="no file", pause_ms=0)
        log.forget()
        log.retry("store.failed", error="no disk", pause_ms=0)
    assert [(each["error"], each["pause_ms"], each.get("repeats")) for each in events] == [
        ("no disk", 0, None),
        ("no disk", 300, 149),
        ("no disk", 400, None),
        ("no file", 0, None),
        ("no disk", 0, None),
    ]


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """Undo at the end what a test does to loggers and structlog."""
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = [(each, each.disabled) for each in known]
    yield
    structlog.reset_defaults()
    for each, is_disabled in before:
        each.disabled = is_disabled


@pytest.mark.usefixtures("own_loggers")
def test_new_levels_replace_the_ones_before(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning,stall=debug,depot=error", "json")
    log_application("stall.tasks", "warning,stall=debug,depot=error")
    for levels in ("warning", "warning,stall=error", "warning"):
        configure_logs(levels, "json", is_reload=True)
        for name in ("stall", "depot"):
            logging.getLogger(name).debug(levels)
            logging.getLogger(name).info(levels)
            logging.getLogger(name).warning(levels)
    logged = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    assert [(each["logger"], each["event"], each["level"]) for each in logged] == [
        ("stall", "warning", "info"),
        ("stall", "warning", "warning"),
        ("depot", "warning", "warning"),
        ("depot", "warning,stall=error", "warning"),
        ("stall", "warning", "info"),
        ("stall", "warning", "warning"),
        ("depot", "warning", "warning"),
    ]


@pytest.mark.usefixtures("own_loggers")
def test_an_application_that_configures_loggers_loses_neither_its_own_lines_nor_those_of_postroom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("info", "json")
    log_application("kiosk.tasks", "info")
    logger().info("a.b")
    logging.config.dictConfig({"version": 1, "loggers": {"others": {"level": "INFO"}}})
    log_application("kiosk.tasks", "info")
    logger().info("a.c")
    logging.getLogger("kiosk").info("greeted")
    assert [json.loads(each)["event"] for each in capsys.readouterr().err.splitlines()] == [
        "a.b",
        "a.c",
        "greeted",
    ]


class Unreadable:
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize(
    ("value", "text"),
    [({(1, 2): 3}, "{(1, 2): 3}"), (float("nan"), "nan"), (Unreadable(), "a Unreadable without text")],
)
def test_a_field_that_json_can_not_have_is_logged_as_text(
    log_format: LogFormat, value: object, text: str
) -> None:
    written = logged(log_format, lambda: logging.getLogger("postroom.a").warning("x", extra={"total": value}))
    assert text in written
    if log_format == "json":
        assert json.loads(written)["total"] == text


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
