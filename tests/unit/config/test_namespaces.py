import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import StructType, Type, UnionType, VarTupleType, type_info

from postroom.adapters.config.document import NamespaceFile
from postroom.adapters.config.namespaces import find_namespace, load_namespaces
from postroom.application.ingest.namespace import (
    KafkaSource,
    Namespace,
    NatsSource,
    PayloadSchema,
    RabbitmqSource,
    RedisSource,
    SchemaFormat,
)
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import DAY_MS

SEED = Path(__file__).with_name("rfc-037.yaml")
MISTAKES = Path(__file__).with_name("mistakes.yaml")
DOCUMENTATION = Path(__file__).parents[3] / "docs/namespaces.md"
SMALL = """\
namespaces:
  - name: orders
    pattern: mailbox
    slots:
      message_source:
        backend: redis
        config:
          url: redis://localhost
          stream: orders
          consumer_group: archive
      storage:
        backend: postgres
        config:
          url: postgresql://localhost/archive
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a namespace file."""

    def write(text: str) -> Path:
        file = tmp_path / "ns.yaml"
        file.write_text(text, "utf-8")
        return file

    return write


def seed_with(old: str, new: str, count: int = -1) -> str:
    """Return the seed's file with some text replaced."""
    text = SEED.read_text("utf-8")
    assert old in text
    return text.replace(old, new, count)


def admin_schema(event: str, message_name: str) -> PayloadSchema:
    return PayloadSchema(
        topic=f"admin.{event}",
        format=SchemaFormat.PROTOBUF,
        message_name=message_name,
        file=None,
        validation=ValidationMode.STRICT,
        allows_unknown_fields=False,
    )


def test_the_rfc_s_own_file_loads_as_it_stands() -> None:
    assert load_namespaces(SEED) == (
        Namespace(
            name="$admin",
            description="Store admin events with searchable headers",
            mailbox="$admin@mailbox-admin",
            store="/Users/jrepp/.prism/mailbox-admin.db",
            source=NatsSource(
                url="nats://localhost:4222", subject="admin.events.>", consumer_group="mailbox-admin"
            ),
            envelope_validation=ValidationMode.STRICT,
            payload_schemas=(
                admin_schema("users.created", "UserCreatedEvent"),
                admin_schema("users.updated", "UserUpdatedEvent"),
                admin_schema("roles.assigned", "RoleAssignedEvent"),
                admin_schema("policies.changed", "PolicyChangedEvent"),
            ),
            batch_size=100,
            max_retries=3,
            history_retention_ms=90 * DAY_MS,
            max_store_bytes=10_000_000_000,
        ),
    )


def test_what_a_file_leaves_out_is_filled_in(write: Write) -> None:
    assert load_namespaces(write(SMALL)) == (
        Namespace(
            name="orders",
            description=None,
            mailbox="orders@archive",
            store="postgresql://localhost/archive",
            source=RedisSource(
                url="redis://localhost", stream="orders", consumer_group="archive", field="data"
            ),
            envelope_validation=ValidationMode.STRICT,
            payload_schemas=(),
            batch_size=500,
            max_retries=3,
            history_retention_ms=None,
            max_store_bytes=None,
        ),
    )


def test_each_broker_may_be_the_source(write: Write) -> None:
    text = SMALL.replace("redis://localhost", "kafka+ssl://a:9093,b:9093").replace("redis", "kafka")
    text = text.replace(
        "stream: orders", "topic: orders\n          ca: ca.pem\n          dead_letter_topic: dead"
    )
    file = write(text)
    assert load_namespaces(file)[0].source == KafkaSource(
        url="kafka+ssl://a:9093,b:9093",
        topic="orders",
        consumer_group="archive",
        ca=str(file.parent / "ca.pem"),
        dead_letter_topic="dead",
    )
    with pytest.raises(
        InvalidRequest, match=r"line 8: .*config\.url must begin with kafka:// or kafka\+ssl://"
    ):
        load_namespaces(write(text.replace("kafka+ssl://", "secret@")))
    with pytest.raises(InvalidRequest, match="certificate and key need each other"):
        load_namespaces(write(text.replace("ca: ca.pem", "certificate: c.pem")))


def test_a_queue_or_a_stream_of_rabbitmq_may_be_the_source(write: Write) -> None:
    text = SMALL.replace("redis://localhost", "amqps://mq/shop").replace("redis", "rabbitmq")
    assert load_namespaces(write(text))[0].source == RabbitmqSource(
        url="amqps://mq/shop", stream="orders", consumer_group="archive"
    )
    with pytest.raises(InvalidRequest, match="either a queue or a stream; name one"):
        load_namespaces(write(text.replace("stream: orders", "stream: orders\n          queue: orders")))
    with pytest.raises(InvalidRequest, match="needs dead_letter_routing_key"):
        load_namespaces(
            write(text.replace("stream: orders", "queue: orders\n          dead_letter_exchange: dead"))
        )


def test_a_file_may_hold_several_namespaces(write: Write) -> None:
    text = SMALL + SMALL.replace("namespaces:\n", "").replace("name: orders", "name: bills")
    namespaces = load_namespaces(write(text))
    assert [namespace.mailbox for namespace in namespaces] == ["orders@archive", "bills@archive"]
    assert find_namespace(namespaces, "bills") is namespaces[1]
    with pytest.raises(InvalidRequest, match=r"several namespaces; name one of orders, bills\.$"):
        find_namespace(namespaces, None)
    with pytest.raises(InvalidRequest, match=r"'order' \(did you mean orders\?\); it has orders, bills\.$"):
        find_namespace(namespaces, "order")
    assert find_namespace(namespaces[:1], None) is namespaces[0]


def test_paths_are_relative_to_the_file(write: Write) -> None:
    text = seed_with("/Users/jrepp/.prism/mailbox-admin.db", "stores/admin.db")
    text = text.replace("        schemas:\n", "        file: admin.binpb\n        schemas:\n")
    file = write(text.replace("durable: true", "credentials: ~/nats.creds"))
    (namespace,) = load_namespaces(file)
    assert namespace.store == str(file.parent / "stores/admin.db")
    assert {schema.file for schema in namespace.payload_schemas} == {file.parent / "admin.binpb"}
    assert isinstance(namespace.source, NatsSource)
    assert namespace.source.credentials == str(Path.home() / "nats.creds")


def test_access_to_nats_is_configured_by_files(write: Write) -> None:
    access = r"\1ca: ca.pem\n\1user: archive\n\1password_file: secrets/nats\n\1tls_first: true"
    text = re.sub(r"( *)durable: true", access, SEED.read_text("utf-8"))
    file = write(text)
    source = load_namespaces(file)[0].source
    assert isinstance(source, NatsSource)
    assert (source.ca, source.tls_first) == (str(file.parent / "ca.pem"), True)
    assert (source.user, source.password_file) == ("archive", str(file.parent / "secrets/nats"))


def test_access_to_nats_that_contradicts_itself_is_refused_by_place(write: Write) -> None:
    file = write(re.sub(r"( *)durable: true", r"\1user: archive", SEED.read_text("utf-8")))
    with pytest.raises(
        InvalidRequest, match=r"message_source.config.* user and password_file need each other"
    ):
        load_namespaces(file)


def test_a_topic_may_have_a_schema_of_its_own(write: Write) -> None:
    text = seed_with(
        "            message_name: UserCreatedEvent\n",
        "            format: json-schema\n            file: user.json\n            validation: warn\n",
    )
    text = text.replace("        schemas:\n", "        file: admin.binpb\n        schemas:\n")
    file = write(text.replace("compatibility: backward", "compatibility: full"))
    first, second, *_ = load_namespaces(file)[0].payload_schemas
    assert (first.format, first.file, first.validation) == (
        SchemaFormat.JSON_SCHEMA,
        file.parent / "user.json",
        ValidationMode.WARN,
    )
    assert (second.format, second.file, second.validation) == (
        SchemaFormat.PROTOBUF,
        file.parent / "admin.binpb",
        ValidationMode.STRICT,
    )
    assert first.allows_unknown_fields
    assert second.allows_unknown_fields


def test_the_shared_file_is_not_taken_for_a_schema_of_another_format(write: Write) -> None:
    text = seed_with("            message_name: UserCreatedEvent\n", "            format: json-schema\n")
    text = text.replace("        schemas:\n", "        file: admin.binpb\n        schemas:\n")
    assert load_namespaces(write(text))[0].payload_schemas[0].file is None


def test_the_mailbox_may_be_named(write: Write) -> None:
    text = seed_with("table_name: mailbox\n", "mailbox: $admin@eu-1\n", 1)
    assert load_namespaces(write(text))[0].mailbox == "$admin@eu-1"


def test_retention_is_said_once_or_twice_the_same(write: Write) -> None:
    only_stored = seed_with("        max_age_days: 90\n", "")
    only_policy = seed_with("          retention_days: 90\n", "")
    for text in (only_stored, only_policy):
        assert load_namespaces(write(text))[0].history_retention_ms == 90 * DAY_MS


def test_a_size_may_be_a_fraction(write: Write) -> None:
    text = seed_with("max_size_gb: 10", "max_size_gb: 0.5")
    assert load_namespaces(write(text))[0].max_store_bytes == 500_000_000


def test_limits_that_a_namespace_does_not_name_stay_as_they_are(write: Write) -> None:
    assert load_namespaces(write(SMALL))[0].limits == {}
    assert load_namespaces(SEED)[0].limits == {
        "history_retention_ms": 90 * DAY_MS,
        "max_store_bytes": 10**10,
    }


def test_anchors_aliases_and_merged_keys_work(write: Write) -> None:
    text = seed_with("    behavior:\n", "    behavior: &usual\n")
    other = SMALL.replace("namespaces:\n", "") + "    behavior:\n      <<: *usual\n      batch_size: 7\n"
    _, orders = load_namespaces(write(text + other))
    assert (orders.batch_size, orders.max_store_bytes) == (7, 10**10)


@pytest.mark.parametrize("mistake", yaml.safe_load(MISTAKES.read_text("utf-8")), ids=lambda one: one["by"])
def test_a_mistake_is_told_with_its_line_and_place(write: Write, mistake: dict[str, str]) -> None:
    file = write(seed_with(mistake["replace"], mistake["by"], 1))
    with pytest.raises(InvalidRequest) as refused:
        load_namespaces(file)
    assert str(refused.value) == f"{file}, {mistake['error']}"


@pytest.fixture
def recursion_limit() -> Iterator[None]:
    """Python's default limit: Hypothesis may leave a higher one after tests that ran before."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "{file}: the file is empty."),
        ("# nothing\n", "{file}: the file is empty."),
        ("- 1\n", "{file}, line 1: the file is a list; it must be a mapping."),
        ("namespaces: []", "{file}, line 1: namespaces is empty; name at least one namespace."),
        ("{}", "{file}, line 1: the file has no namespaces; it must have one."),
        ("a: [1", "{file}, line 1: this is not valid YAML: expected ',' or ']', but got '<stream end>'."),
        (
            "a: 1\n\tb: 2",
            "{file}, line 2: this is not valid YAML: found character '\\t' that cannot start any token.",
        ),
        ("namespaces: !!python/name:os.system 1", "{file}, line 1: namespaces is 1; it must be a list."),
        ("namespaces: *nothing", "{file}, line 1: this is not valid YAML: found undefined alias 'nothing'."),
        ("a: 1\n---\nb: 2", "{file}, line 2: this is not valid YAML: but found another document."),
        ("[" * 5_000, "{file} is nested too deeply to be read."),
        ("#" * (1 << 20) + "\n", "{file} is larger than 1048576 bytes; split it."),
        (
            SMALL + SMALL.replace("namespaces:\n", ""),
            "{file}, line 15: namespaces[1].name is 'orders', as is namespaces[0].name; rename one.",
        ),
        (
            SMALL.replace("url: redis://", "url: http://secret@"),
            (
                "{file}, line 8: namespaces[0].slots.message_source.config.url must begin with redis://, "
                "rediss:// or unix://."
            ),
        ),
        (
            SMALL.replace("postgresql://", ""),
            "{file}, line 14: namespaces[0].slots.storage.config.url must begin with postgresql:// or postgres://.",
        ),
    ],
)
def test_a_file_that_is_no_namespace_file_is_refused(
    write: Write, recursion_limit: None, text: str, error: str
) -> None:
    file = write(text)
    with pytest.raises(InvalidRequest) as refused:
        load_namespaces(file)
    assert str(refused.value) == error.format(file=file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"ns\.yaml can't be read: No such file or directory; name a file that"
    ):
        load_namespaces(tmp_path / "ns.yaml")
    with pytest.raises(InvalidRequest, match="can't be read: Is a directory"):
        load_namespaces(tmp_path)


def test_the_example_of_the_documentation_loads_and_no_key_is_missing_there(write: Write) -> None:
    page = DOCUMENTATION.read_text("utf-8")
    (namespace,) = load_namespaces(write(page.split("```yaml\n")[1].split("```")[0]))
    assert [schema.topic for schema in namespace.payload_schemas] == ["admin.users.created", "admin.audit.*"]
    missing = [key for key in _keys(type_info(NamespaceFile)) if key not in page]
    assert missing == []


def _keys(kind: Type) -> Iterator[str]:
    """Yield the keys of a type's structs, however deep."""
    match kind:
        case StructType(fields=fields):
            for field in fields:
                yield field.encode_name
                yield from _keys(field.type)
        case UnionType(types=types):
            for one in types:
                yield from _keys(one)
        case VarTupleType(item_type=item):
            yield from _keys(item)


_KEYS = st.sampled_from(
    ["namespaces", "name", "pattern", "slots", "storage", "message_source", "config", "backend", "schemas"]
) | st.text(max_size=5)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.binary(max_size=200)
    | st.text(alphabet="namespaces:[]{}&*<!|>-'\"#% \n\t01", max_size=60).map(str.encode)
)
def test_any_bytes_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest):
        load_namespaces(file)


@given(place=st.lists(st.integers(0, 20), min_size=1, max_size=8), value=_ANYTHING)
def test_anything_anywhere_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: list[int], value: object
) -> None:
    document = yaml.safe_load(SEED.read_text("utf-8"))
    _put(document, place, value)
    file = tmp_path_factory.getbasetemp() / "anything.yaml"
    file.write_text(yaml.safe_dump(document, allow_unicode=True, sort_keys=False), "utf-8")
    try:
        namespaces = load_namespaces(file)
    except InvalidRequest as error:
        assert str(error).startswith(str(file))  # noqa: PT017  # a refusal is one of two good answers
        assert str(error).endswith(".")  # noqa: PT017
    else:
        assert all(isinstance(namespace, Namespace) for namespace in namespaces)


def test_a_file_written_by_other_tools_means_the_same(write: Write) -> None:
    document = yaml.safe_load(SEED.read_text("utf-8"))
    for flow in (True, False):
        assert load_namespaces(write(yaml.safe_dump(document, default_flow_style=flow))) == load_namespaces(
            SEED
        )


def _put(document: object, place: list[int], value: object) -> None:
    """Replace what stands somewhere in a document; each number says which branch to take."""
    *way, last = place
    for step in way:
        if isinstance(document, dict) and document:
            child = document[list(document)[step % len(document)]]
        elif isinstance(document, list) and document:
            child = document[step % len(document)]
        else:
            break
        if not isinstance(child, dict | list):
            break
        document = child
    if isinstance(document, dict) and document:
        document[list(document)[last % len(document)]] = value
    elif isinstance(document, list) and document:
        document[last % len(document)] = value
