"""What retention archived is still told of: by every command that looks back, and by `postroom segments`."""

import asyncio
from contextlib import closing

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter
from postroom.domain.settings import SettingsChanges
from tests.conformance.records import append, stored

MAILBOX = "main@local"
QUESTIONS = (
    ("backlog",),
    ("dlq", "list"),
)


@pytest.fixture
async def died(postroom):
    """The id of a message that died and was purged, so that retention may remove it."""
    policy = TopicPolicy(max_attempts=1)
    async with open_mailbox(str(postroom.store), MAILBOX, default_policy=policy) as mailbox:
        sent = await mailbox.send_message(NewMessage(topic="mail", payload=b"{"))
        (received,) = await mailbox.receive_messages("mail", consumer="worker-1")
        await mailbox.nack_messages([received.receipt], reason="not JSON", delay_ms=0)
        await mailbox.purge_topic("mail")
        await mailbox.send_message(NewMessage(topic="other", payload=b"x"))
    return sent.message_id


async def live(postroom):
    """Let nothing be left unsettled, and a message be sent and dealt with."""
    async with open_mailbox(str(postroom.store), MAILBOX) as mailbox:
        await mailbox.purge_topic("other", ready=True)
        await mailbox.send_message(NewMessage(topic="mail", payload=b"{}"))
        (received,) = await mailbox.receive_messages("mail")
        await mailbox.ack_messages([received.receipt])


async def retain(postroom, archive, rounds=1):
    """Let retention remove what it may."""
    removed = []
    for _ in range(rounds):
        async with open_mailbox(str(postroom.store), MAILBOX, archive=archive) as mailbox:
            await mailbox.set_settings(SettingsChanges({"history_retention_ms": 1}))
            await asyncio.sleep(0.01)
            removed.append(await mailbox.retention.enforce_age())
    return removed


def answers(postroom, last, *options):
    """Return what every position of the log is like."""
    return [
        postroom.ok(*question, "--at", str(position), "--json", *options).json
        for question in QUESTIONS
        for position in (0, 4, last)
    ]


async def test_looking_back_reaches_before_retention(postroom, died):
    last = postroom.ok("verify", "--json").json["mailboxes"][0]["last"]
    shown, account = (postroom.ok("show", died, *why, "--json").json for why in ([], ["--why"]))
    simulation = postroom.ok("views", "simulate", "--max-attempts", "5", "--json").json
    before = answers(postroom, last)
    folder = postroom.folder / "kept"
    (removed,) = await retain(postroom, folder)
    assert removed > 4
    gone = postroom("backlog", "--at", "3", "--json")
    assert (gone.code, gone.error["code"]) == (3, "E_NOT_FOUND")
    assert postroom("show", died).code == 3

    option = ("--archive", str(folder))
    assert answers(postroom, last, *option) == before
    assert postroom.ok("show", died, "--json", *option).json == shown
    assert postroom.ok("show", died, "--why", "--json", *option).json["story"] == account["story"]
    simulated = postroom.ok("views", "simulate", "--max-attempts", "5", "--json", *option).json
    assert simulated["observed"]["dead_lettered"] == simulation["observed"]["dead_lettered"] == 1
    verified = postroom.ok("verify", "--json", *option).json["mailboxes"][0]
    assert verified["first"] == 1
    assert verified["messages"] == 2

    (postroom.folder / "postroom.toml").write_text(f'[archive]\nfolder = "{folder}"\n')
    assert answers(postroom, last) == before
    assert postroom.ok("show", died, "--json").json == shown


async def test_read_models_include_the_archive_of_the_settings(postroom, died):
    await retain(postroom, postroom.folder / "kept")
    engine = ("--engine", "local", "--json")
    assert postroom.ok("views", "rebuild", *engine).json["rows"]["mailbox"] == 1
    (postroom.folder / "postroom.toml").write_text('[archive]\nfolder = "kept"\n')
    assert postroom.ok("views", "rebuild", *engine).json["rows"]["mailbox"] == 2
    await live(postroom)
    await retain(postroom, postroom.folder / "kept")
    postroom.ok("views", "follow", "--once")
    with closing(open_read_models(str(postroom.store))) as models:  # in another working directory
        found = models.search(EventFilter()).items
        assert models.get(died).envelope_blob
    assert len(found) == 3
    assert postroom.ok("views", "verify", *engine).json["skipped"] == []

    assert "retention removed" in postroom.ok("views", "verify", "--archive", "", *engine).out
    rebuilt = postroom.ok("views", "rebuild", "--archive", "", *engine).json
    assert rebuilt["rows"]["mailbox"] < 3


async def test_the_archive_lists_its_segments(postroom, died):
    folder = postroom.folder / "kept"
    (removed,) = await retain(postroom, folder)
    (segment,) = postroom.ok("segments", "list", "--archive", str(folder), "--json").json["segments"]
    (file,) = (folder / MAILBOX).glob("*.parquet")
    assert segment == {
        "mailbox": MAILBOX,
        "first": 1,
        "last": removed,
        "records": removed,
        "bytes": file.stat().st_size,
    }
    assert MAILBOX in postroom.ok("segments", "list", "--archive", str(folder)).out


async def test_the_archive_is_verified_together_with_the_log_that_goes_on(postroom, died):
    folder = postroom.folder / "kept"
    removed = sum(await retain(postroom, folder, rounds=2))
    option = ("--archive", str(folder))
    (told,) = postroom.ok("segments", "verify", *option, "--json").json["mailboxes"]
    assert (told["first"], told["last"], told["records"], told["gaps"]) == (1, removed, removed, [])
    assert told["log_first"] == removed + 1
    text = postroom.ok("segments", "verify", *option).out
    assert f"{MAILBOX}: intact, records 1 to {removed}" in text
    assert f"the log in postroom.db continues it, from position {removed + 1}" in text

    postroom.store.rename(postroom.folder / "elsewhere.db")
    assert "has no log that continues it" in postroom.ok("segments", "verify", *option).out


async def test_an_archive_that_was_altered_or_is_another_store_s_is_found_out(postroom, died):
    folder = postroom.folder / "kept"
    await retain(postroom, folder)
    option = ("--archive", str(folder))
    postroom.ok("send", "mail", "y", "--store", "other.db")
    other = postroom("segments", "verify", *option, "--store", "other.db", "--json")
    assert (other.code, other.error["code"]) == (4, "E_UNAVAILABLE")
    assert "another history" in other.error["message"]
    assert "another history" in postroom("backlog", *option, "--store", "other.db").err
    assert "another history" in postroom("segments", "compact", *option, "--store", "other.db").err
    (file,) = (folder / MAILBOX).glob("*.parquet")
    kept = pq.read_table(file)
    at = kept.column_names.index("at")
    altered = kept.set_column(at, kept.schema.field(at), pc.add(kept["at"], 1))
    pq.write_table(altered.replace_schema_metadata(kept.schema.metadata), file)
    assert postroom("segments", "verify", *option).code == 5


async def test_what_went_without_being_archived_is_told(postroom, died):
    folder = postroom.folder / "kept"
    removed = []
    for archive in (None, folder, None):
        removed += await retain(postroom, archive)
        await live(postroom)
    before, first, last = removed[0], removed[0] + 1, removed[0] + removed[1]
    assert before > 0
    (told,) = postroom.ok("segments", "verify", "--archive", str(folder), "--json").json["mailboxes"]
    assert (told["first"], told["last"], told["records"]) == (first, last, removed[1])
    assert told["gaps"] == [{"first": last + 1, "last": last + removed[2]}]
    looking = postroom("backlog", "--archive", str(folder), "--json")
    assert f"lacks positions {last + 1} to {last + removed[2]}" in looking.error["message"]


def test_an_archive_that_is_not_there_is_said_to_be_missing(postroom):
    postroom.ok("send", "mail", "x")
    missing = postroom("backlog", "--archive", "nowhere", "--json")
    assert (missing.code, missing.error["code"]) == (3, "E_NOT_FOUND")
    assert "There is no archive at nowhere" in missing.error["message"]
    assert "pass --archive FOLDER" in postroom("segments", "list").err
    assert "There is no archive at nowhere" in postroom("views", "rebuild", "--archive", "nowhere").err
    assert "pass --archive FOLDER" in postroom("segments", "build", "--archive", "").err
    for path in ("postroom.db", "postroom.db/below"):
        assert "Not a directory" in postroom("segments", "build", "--archive", path).err
    (postroom.folder / "postroom.toml").write_text('[archive]\nfolder = "later"\n')
    postroom.ok("backlog")  # retention has stored nothing yet
    assert "`postroom segments build` creates it" in postroom("segments", "verify").err


def test_segments_are_built_ahead_of_retention_listed_and_merged(postroom):
    option = ("--archive", "segments")
    for _ in range(2):
        postroom.ok("send", "mail", "x")
        (built,) = postroom.ok("segments", "build", "--all", *option, "--json").json["mailboxes"]
        assert (built["mailbox"], built["added"], built["remaining"]) == (MAILBOX, 1, 0)
    text = postroom.ok("segments", "build", *option).out
    assert f"{MAILBOX}: 0 segments added, through position {built['last']}; 0 records only in the log" in text
    segments = postroom.ok("segments", "list", *option, "--json").json["segments"]
    assert [each["first"] for each in segments] == [1, segments[0]["last"] + 1]
    (compacted,) = postroom.ok("segments", "compact", *option, "--json").json["mailboxes"]
    assert compacted == {"mailbox": MAILBOX, "merged": 2, "segments": 1}
    (told,) = postroom.ok("segments", "verify", *option, "--json").json["mailboxes"]
    assert (told["segments"], told["last"], told["log_first"]) == (1, built["last"], 1)
    shown = postroom.ok("views", "rebuild", "--engine", "local", "--verify", *option, "--json").json
    assert shown["rows"]["mailbox"] == 2


def test_the_follower_builds_segments_as_the_log_grows(postroom):
    with closing(SqliteEventLog(str(postroom.store), MAILBOX, durability="relaxed")) as log:
        append(log, [stored(number, at=1_000 + number // 1_000) for number in range(51_000)])
    settings = postroom.folder / "postroom.toml"
    settings.write_text('[archive]\nfolder = "segments"\nahead = true\n')
    assert "no read models" in postroom("views", "follow", "--once").err
    (segment,) = postroom.ok("segments", "list", "--json").json["segments"]
    assert (segment["first"], segment["records"]) == (1, 50_000)
    settings.write_text(f'[archive]\nfolder = "{postroom.store}/no"\nahead = true\n')
    assert "archive.not_built" in postroom("views", "follow", "--once").err
