from datetime import UTC, datetime, timedelta, timezone

import pytest

from postroom.adapters.cli.values import WrongUsage, parse_moment

NOW = datetime(2026, 2, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("0", 0),
        ("1200", 1_200),
        ("5m", NOW - timedelta(minutes=5)),
        ("0.5s", NOW - timedelta(milliseconds=500)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T08:00:00.000001Z", datetime(2026, 1, 31, 8, 0, 0, 1, tzinfo=UTC)),
        ("2026-01-31T08:00", datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ("2026-01-31T08:00:00+02:00", datetime(2026, 1, 31, 8, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_a_point_in_time_is_a_position_a_time_or_an_age(text: str, moment: int | datetime) -> None:
    assert parse_moment(text, NOW) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "yesterday",
        "5 minutes",
        "2026-13-01",
        "99999999999999d",
        "1000000d",
        "9" * 5_000,
        "\N{ARABIC-INDIC DIGIT THREE}",
    ],
)
def test_anything_else_is_not_a_point_in_time(text: str) -> None:
    with pytest.raises(WrongUsage, match="is not a point in time; write a log position such as 1200"):
        parse_moment(text, NOW)
