"""`postroom streams`: streams and consumers become what the settings file says."""

import asyncio
import json
import shutil
from typing import Any

import msgspec
import nats
import pytest

from tests.e2e.conftest import ROOT, Postroom

EXAMPLE = ROOT / "docs" / "examples" / "streams.toml"
SEA = {"subjects": ["sea.event.>"], "max_age": "7d"}


def write_settings(postroom: Postroom, tables: dict[str, Any]) -> None:
    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
        return json.dumps(value)

    lines = [f"{name} = {toml(table)}\n" for name, table in tables.items()]
    (postroom.folder / "postroom.toml").write_text("".join(lines))


class Streams:
    """The command, in a folder with a settings file, at a server of its own."""

    def __init__(self, postroom: Postroom, url: str) -> None:
        self.postroom = postroom
        self.url = url

    def define(self, streams: dict[str, Any], consumers: dict[str, Any] | None = None) -> None:
        tables = {"nats": {"url": self.url}, "streams": streams, "consumers": consumers or {}}
        write_settings(self.postroom, tables)

    def __call__(self, *arguments: str, **environment: Any) -> Any:
        return self.postroom("streams", *arguments, "--json", **environment)

    def server_config(self, stream: str, consumer: str | None = None) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            client = await nats.connect(self.url)
            where = f"CONSUMER.INFO.{stream}.{consumer}" if consumer else f"STREAM.INFO.{stream}"
            answer = await client.request(f"$JS.API.{where}")
            await client.close()
            config: dict[str, Any] = msgspec.json.decode(answer.data)["config"]
            return config

        return asyncio.run(ask())


@pytest.fixture
def streams(postroom: Postroom, nats_url: str) -> Streams:
    return Streams(postroom, nats_url)


def test_the_example_file_makes_what_the_specification_says(streams: Streams) -> None:
    shutil.copy(EXAMPLE, streams.postroom.folder / "postroom.toml")
    given = {"POSTROOM_NATS__URL": streams.url}
    assert streams("apply", "--yes", "--replicas", "1", **given).code == 0
    again = streams("diff", "--replicas", "1", **given)
    assert (again.code, again.json) == (0, {"differences": []})
    day, gigabyte = 86_400 * 10**9, 10**9
    for name, subject in (("SEA_EVENTS", "sea.event.>"), ("VIBESPRO_EVENTS", "vibespro.event.>")):
        made = streams.server_config(name)
        assert made["subjects"] == [subject]
        assert (made["retention"], made["storage"]) == ("limits", "file")
        assert (made["max_age"], made["max_bytes"]) == (7 * day, 10 * gigabyte)
    reader = streams.server_config("VIBESPRO_EVENTS", "sea__from_vibespro")
    assert reader["durable_name"] == "sea__from_vibespro"
    assert reader["filter_subject"] == "vibespro.event.>"
    assert (reader["ack_policy"], reader["ack_wait"]) == ("explicit", 120 * 10**9)
    assert reader["max_ack_pending"] == 50
    # The worker counts: what the server drops at its own limit is lost to everybody.
    assert (reader["max_deliver"], reader["metadata"]["postroom.max_deliver"]) == (-1, "20")


def test_the_example_file_asks_for_three_replicas_and_one_server_says_what_to_do(streams: Streams) -> None:
    done = streams("apply", "--yes", "--config", str(EXAMPLE), "--nats", streams.url)
    assert done.code == 1
    assert "replicas > 1 not supported" in done.error["message"]
    assert "set fewer with --replicas or [streams] replicas" in done.error["message"]


def test_a_difference_is_shown_to_scripts_by_exit_code_and_to_people_as_a_table(streams: Streams) -> None:
    streams.define({"SEA_EVENTS": SEA})
    streams("apply", "--yes")
    streams.define({"SEA_EVENTS": SEA | {"max_age": "3d", "max_bytes": "1GiB"}})
    differs = streams("diff")
    assert differs.code == 6
    assert [(each["field"], each["current"], each["desired"]) for each in differs.json["differences"]] == [
        ("max_age_ms", 604_800_000, 259_200_000),
        ("max_bytes", None, 2**30),
    ]
    shown = streams.postroom("streams", "diff", "--wide").out
    assert [line.split()[:6] for line in shown.splitlines() if line.startswith("~") or "~ " in line] == [
        ["~", "stream", "SEA_EVENTS", "max_age", "7d", "3d"],
        ["~", "stream", "SEA_EVENTS", "max_bytes", "unlimited", "1GiB"],
    ]
    assert "messages beyond it are deleted at once" in shown
    assert streams("apply", "--yes").code == 0
    assert streams.server_config("SEA_EVENTS")["max_bytes"] == 2**30


def test_nothing_changes_where_nobody_agreed(streams: Streams) -> None:
    streams.define({"SEA_EVENTS": SEA})
    done = streams("apply")
    assert done.code == 1
    assert "add --yes" in done.error["message"]
    assert streams("list").json == {"streams": []}


def test_what_nats_can_not_change_is_refused_before_anything_is_changed(streams: Streams) -> None:
    streams.define({"SEA_EVENTS": SEA})
    streams("apply", "--yes")
    streams.define({"OTHER": {"subjects": ["other"]}, "SEA_EVENTS": SEA | {"storage": "memory"}})
    done = streams("apply", "--yes")
    assert done.code == 1
    assert "NATS can't change storage from file to memory" in done.error["message"]
    assert [each["name"] for each in streams("list").json["streams"]] == ["SEA_EVENTS"]


def test_a_server_that_is_not_there_is_unavailable(streams: Streams) -> None:
    streams.define({"SEA_EVENTS": SEA})
    done = streams("diff", "--nats", "nats://127.0.0.1:1")
    assert done.code == 4
    assert "NATS at nats://127.0.0.1:1 can't be reached" in done.error["message"]
