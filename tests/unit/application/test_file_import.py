import json
from base64 import b64encode

import pytest

from postroom.application.ingest.file_import import (
    RecordMapping,
    TopicTemplate,
    line_id,
    map_message,
    parse_path,
    read_record,
    time_us,
)
from postroom.application.messages import NewMessage
from postroom.application.ports.source import Headers, SourceMessage
from postroom.domain.errors import InvalidRequest

EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t.made"}


def event(**fields):
    return json.dumps({name: value for name, value in (EVENT | fields).items() if value is not ...}).encode()


def read_message(line: bytes) -> NewMessage:
    message = read_record(line, 1)
    assert isinstance(message, NewMessage)
    return message


def mapped(line, **fields):
    topic = TopicTemplate(fields.pop("topic", "t"))
    paths = {name: parse_path(path) for name, path in fields.pop("headers", {}).items()}
    others = {name: parse_path(path) for name, path in fields.items()}
    return read_record(line, 1, RecordMapping(topic=topic, headers=paths, **others))


@pytest.mark.parametrize(
    ("template", "document", "topic"),
    [
        ("github.{event}.{action}", {"event": "push", "action": "made"}, "github.push.made"),
        ("github.{event}.{action}", {"event": "push", "action": None}, "github.push"),
        ("github.{event}.{action}", {"action": "made"}, "github.made"),
        ("{a.b.1}.x", {"a": {"b": [7, 8]}}, "8.x"),
        ("{a}-{b}.x", {"a": 1, "b": True}, "1-true.x"),
        ("{a}-{b}.x", {"a": 1}, "x"),
        ("fixed", {}, "fixed"),
        ("v{n}", {"n": 1.50}, "v1.5"),
    ],
)
def test_a_topic_is_made_of_the_fields_that_are_there(template, document, topic):
    assert mapped(json.dumps(document).encode(), topic=template).topic == topic


@pytest.mark.parametrize("template", ["", "a..b", ".a", "a.", "{", "a{}", "{a}}"])
def test_a_malformed_template_is_refused(template):
    with pytest.raises(InvalidRequest, match="template"):
        TopicTemplate(template)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not valid JSON"),
        (b'{"t": null}', "null or missing"),
        (b'{"t": {"x": 1}}', "an object"),
        (b'{"t": [1]}', "an array"),
        (b'{"t": "a b"}', "Topic name"),
        (b'"\xff"', "not valid JSON"),
    ],
)
def test_a_line_that_gives_no_topic_is_refused_with_the_reason(line, reason):
    with pytest.raises(InvalidRequest, match=reason):
        mapped(line, topic="{t}")


def test_the_payload_is_the_line_itself():
    line = b'{ "n": 1e400,\t"m": 00.1 }'.replace(b"00.1", b"0.10")

    assert mapped(line).payload == line


def test_headers_are_taken_from_fields_and_unknown_names_become_custom_headers():
    line = b'{"who": {"login": "ada"}, "trace": "t1", "n": 12.50, "no": null}'

    message = mapped(
        line,
        headers={"principal": "who.login", "trace_id": "trace", "size": "n", "absent": "no", "gone": "x.y"},
    )

    assert (message.principal, message.trace_id) == ("ada", "t1")
    assert message.attrs == {"size": "12.50"}
    assert message.content_type == "application/json"


def test_key_time_and_id_are_taken_from_fields():
    message = mapped(b'{"k": 7, "t": 1700000000, "id": "m-1"}', key="k", time="t", id="id")

    assert (message.sticky_key, message.published_at_us, message.message_id) == (
        "7",
        1_700_000_000_000_000,
        "m-1",
    )
    with pytest.raises(InvalidRequest, match="no message id at id"):
        mapped(b"{}", id="id")


def test_the_id_of_a_line_depends_on_its_content_and_its_number_alone():
    assert line_id(b"a", 1) == line_id(b"a", 1)
    assert len({line_id(b"a", 1), line_id(b"a", 2), line_id(b"b", 1), line_id(b"1\na", 1)}) == 4
    assert line_id(b"a", 1)[14] == "8"


@pytest.mark.parametrize(
    ("value", "us"),
    [
        ("2026-01-31T08:00:00Z", 1_769_846_400_000_000),
        ("2026-01-31T09:00:00.123456+01:00", 1_769_846_400_123_456),
        (1_769_846_400, 1_769_846_400_000_000),
        (1_769_846_400.25, 1_769_846_400_250_000),
        (1_769_846_400_123, 1_769_846_400_123_000),
        (1_769_846_400_123_456, 1_769_846_400_123_456),
        ("1969-12-31T23:59:59.5Z", -500_000),
        (0, 0),
    ],
)
def test_times_are_read_in_every_common_form(value, us):
    assert time_us(value) == us


@pytest.mark.parametrize(
    ("value", "us"),
    [
        (1_769_846_400_123_456, 1_769_846_400_123_456),
        (1_769_846_400_123_456_789, 1_769_846_400_123_456),
        ("2026-01-31T08:00:00.123456789Z", 1_769_846_400_123_456),
    ],
    ids=["MicroTimestamp", "NanoTimestamp", "ZonedTimestamp"],
)
def test_times_of_debezium_are_read(value, us):
    assert time_us(value) == us


@pytest.mark.parametrize("value", ["2026-01-31T08:00:00", "yesterday", True, None, [], 10**30, ""])
def test_what_is_no_time_is_refused(value):
    with pytest.raises(InvalidRequest, match="not a time"):
        time_us(value)


TOPIC = RecordMapping(topic=TopicTemplate("web.{kind}"))


def delivered(data, headers=(), sequence="7", **fields):
    return SourceMessage("acme", data, Headers(headers), 1, sequence, None, **fields)


@pytest.mark.parametrize(
    ("data", "topic", "content_type"),
    [
        (b'{"kind": "a"}', "web.a", "application/json"),
        (b"plain text, with umlauts: \xc3\xbc", "web", "text/plain; charset=utf-8"),
        (b"\xff\x00", "web", "application/octet-stream"),
        (b"", "web", "text/plain; charset=utf-8"),
    ],
    ids=["json", "text", "bytes", "empty"],
)
def test_a_message_of_a_broker_is_json_text_or_bytes(data, topic, content_type):
    message = map_message(delivered(data), TOPIC, has_places=True)
    assert (message.topic, message.payload, message.content_type) == (topic, data, content_type)


def test_headers_of_a_broker_become_those_of_the_message_and_fields_take_precedence():
    headers = [
        ("Content-Type", "application/x.order+json"),
        ("correlation-id", "request 1"),
        ("Causation-Id", "order 1"),
        ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
        ("Nats-Msg-Id", "m-1"),
        ("Nats-Expected-Stream", "S"),
        ("tenant", "Zoë"),
        ("level", "1"),
    ]
    mapping = RecordMapping(
        topic=TopicTemplate("web"), headers={"level": ("level",), "principal": ("who",)}, key=("key",)
    )
    data = b'{"level": 2, "who": "anna", "key": "k"}'
    message = map_message(delivered(data, headers, sticky_key="other"), mapping, has_places=True)
    assert (message.message_id, message.content_type) == ("m-1", "application/x.order+json")
    assert (message.correlation_id, message.causality_parent) == ("request 1", "order 1")
    assert (message.trace_id, message.span_id, message.principal) == ("a" * 32, "b" * 16, "anna")
    assert (message.sticky_key, message.attrs) == ("k", {"tenant": "Zoë", "level": "2"})


def test_a_delivery_is_recognised_by_its_place_and_content():
    def id_of(message, *, has_places=True):
        return map_message(message, TOPIC, has_places=has_places).message_id

    assert id_of(delivered(b"1")) == id_of(delivered(b"1"))
    others = [delivered(b"1"), delivered(b"2"), delivered(b"1", sequence="8")]
    assert len({id_of(each) for each in others}) == 3
    assert id_of(delivered(b"1"), has_places=False) is None
    assert id_of(delivered(b"1", [("message_id", "m-1")]), has_places=False) == "m-1"


def test_a_message_without_the_field_of_its_id_is_refused():
    with pytest.raises(InvalidRequest, match=r"no message id at id\."):
        map_message(delivered(b"text"), RecordMapping(topic=TopicTemplate("t"), id=("id",)), has_places=True)


def test_a_cloud_event_keeps_its_context():
    line = event(
        time="2026-01-31T08:00:00Z",
        subject="s1",
        dataschema="http://schema",
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        partitionkey="p1",
        correlationid="c1",
        retries=3,
        unset=None,
    )

    message = read_message(line)

    assert (message.topic, message.message_id, message.sticky_key) == ("t.made", "/s|1", "p1")
    assert (message.schema_url, message.correlation_id) == ("http://schema", "c1")
    assert (message.trace_id, message.span_id) == ("a" * 32, "b" * 16)
    assert message.published_at_us == 1_769_846_400_000_000
    assert message.attrs["ce_retries"] == "3"
    assert message.attrs["ce_source"] == "/s"
    assert message.attrs.keys().isdisjoint({"ce_time", "ce_dataschema", "ce_unset"})


def test_an_invalid_trace_context_of_a_cloud_event_is_only_an_attribute():
    message = read_message(event(traceparent=f"00-{'0' * 32}-{'b' * 16}-01"))

    assert (message.trace_id, message.attrs["ce_traceparent"][:4]) == (None, "00-0")


@pytest.mark.parametrize(
    ("fields", "payload", "content_type"),
    [
        ('"data":{"a": 1.50}', b'{"a": 1.50}', "application/json"),
        ('"data":"text"', b'"text"', "application/json"),
        ('"datacontenttype":"text/plain","data":"text"', b"text", "text/plain"),
        ('"datacontenttype":"application/x+json","data":"text"', b'"text"', "application/x+json"),
        ('"datacontenttype":"image/png","data_base64":"AAEC"', b"\x00\x01\x02", "image/png"),
        ('"subject":"no data"', b"", None),
    ],
)
def test_the_data_of_a_cloud_event_becomes_the_payload(fields, payload, content_type):
    message = read_message(event()[:-1] + b"," + fields.encode() + b"}")

    assert (message.payload, message.content_type) == (payload, content_type)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1}', "not a CloudEvent"),
        (event(id=...), "no id"),
        (event(source=""), "no source"),
        (event(specversion="0.3"), "version '0.3'"),
        (event(data=1, data_base64="AA=="), "both data and data_base64"),
        (event(data_base64="?"), "not base64"),
        (event(time="noon"), "not a time"),
        (event(type="a b"), "Topic name"),
        (b"{not json", "not valid JSON"),
        (b"not base64!", "neither JSON nor an envelope"),
    ],
)
def test_a_line_that_is_neither_cloud_event_nor_envelope_is_refused_with_the_reason(line, reason):
    with pytest.raises(InvalidRequest, match=reason):
        read_record(line, 1)


def test_two_cloud_events_never_share_an_id():
    pairs = [("/s", "1"), ("/s|1", "1"), ("/s", "1|1"), ("/s" * 200, "1"), ("/s" * 200, "2")]

    ids = [read_message(event(source=source, id=id_)).message_id for source, id_ in pairs]

    assert len(set(ids)) == len(pairs)
    assert all(id_ is not None and len(id_) <= 255 for id_ in ids)


def test_any_other_line_is_an_envelope_in_base64():
    assert read_record(b64encode(b"any bytes"), 1) == b"any bytes"


DEEP = b"[" * 100_000
BOTTOM = DEEP + b"]" * 100_000


@pytest.mark.parametrize("deep", [DEEP, BOTTOM, b'{"a":' * 100_000])
def test_json_nested_too_deeply_is_a_refused_line(deep):
    with pytest.raises(InvalidRequest, match=r"nested too deeply|not valid JSON"):
        mapped(deep, topic="t")
    event = b'{"specversion":"1.0","id":"1","source":"/s","type":"t","%s":' + deep + b"}"
    for field in (b"data", b"data_base64", b"subject"):
        with pytest.raises(InvalidRequest, match=r"nested too deeply|not valid JSON|not base64"):
            read_record(event % field, 1)
    text = b'{"specversion":"1.0","id":"1","source":"/s","type":"t","datacontenttype":"text/plain","data":'
    with pytest.raises(InvalidRequest, match=r"nested too deeply|not valid JSON"):
        read_record(text + deep + b"}", 1)
