"""Namespaces of a file in YAML: sources and stores of ingestion, and policies of leases."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from postroom.adapters.config.document import (
    KafkaSlot,
    LeaseNamespaceEntry,
    LeaseNamespaceFile,
    NamespaceEntry,
    NamespaceFile,
    NatsSlot,
    PayloadSchemas,
    PostgresConfig,
    PostgresQueryConfig,
    RabbitmqSlot,
    RedisSlot,
    SqliteConfig,
    SqliteQueryConfig,
    TopicSchema,
)
from postroom.adapters.config.reader import YamlReader, join_with_or, suggestion
from postroom.application.cluster.control_plane_metrics import scale_policy
from postroom.application.ingest.namespace import (
    KafkaSource,
    MessageSource,
    Namespace,
    NatsSource,
    PayloadSchema,
    RabbitmqSource,
    RedisSource,
    SchemaFormat,
)
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.names import check_mailbox
from postroom.domain.policy import DAY_MS

GB = 10**9
REDIS_URLS = ("redis://", "rediss://", "unix://")
POSTGRES_URLS = ("postgresql://", "postgres://")
RABBITMQ_URLS = ("amqp://", "amqps://")
KAFKA_URLS = ("kafka://", "kafka+ssl://")
_SOURCES: dict[type, tuple[type[MessageSource], tuple[str, ...]]] = {
    NatsSlot: (NatsSource, ()),
    RedisSlot: (RedisSource, REDIS_URLS),
    KafkaSlot: (KafkaSource, KAFKA_URLS),
    RabbitmqSlot: (RabbitmqSource, RABBITMQ_URLS),
}
"""The source of each slot, and how its URL begins."""
_CONSUMER = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


def load_namespaces(file: str | Path) -> tuple[Namespace, ...]:
    """Return the namespaces of a YAML file, in its order (RFC-037 pattern configuration).

    Arguments:
        file: the YAML file; paths in it are relative to its folder.

    Raises: InvalidRequest with file, line and key.
    """
    reader = YamlReader(Path(file))
    entries = reader.read(NamespaceFile).namespaces
    if not entries:
        raise reader.refusal("namespaces", "is empty; name at least one namespace")
    namespaces = tuple(_Resolver(reader, entry, index).resolve() for index, entry in enumerate(entries))
    _check_distinct(reader, namespaces)
    return namespaces


def find_namespace(namespaces: tuple[Namespace, ...], name: str | None) -> Namespace:
    """Return a namespace by name, or the only one; raise `InvalidRequest` if it does not exist.

    Arguments:
        namespaces: of `load_namespaces`.
        name: of one of them; None if there is only one.
    """
    names = [namespace.name for namespace in namespaces]
    if name is None and len(namespaces) == 1:
        return namespaces[0]
    if name is None:
        raise InvalidRequest(f"The file has several namespaces; name one of {', '.join(names)}.")
    if name not in names:
        raise InvalidRequest(
            f"The file has no namespace {name!r}{suggestion(name, names)}; it has {', '.join(names)}."
        )
    return namespaces[names.index(name)]


class _Resolver:
    """Resolver of an entry: checks its keys against each other and fills in defaults."""

    def __init__(self, reader: YamlReader, entry: NamespaceEntry, index: int) -> None:
        self._reader = reader
        self._entry = entry
        self._place = f"namespaces[{index}]"

    def resolve(self) -> Namespace:
        entry, behavior = self._entry, self._entry.behavior
        if not behavior.auto_commit:
            raise self._refusal(
                "behavior.auto_commit",
                "is false, which would leave every message unacknowledged, so that the source redelivers "
                "them for ever; omit it or set it to true",
            )
        storage = entry.slots.storage.config
        if isinstance(storage, PostgresConfig):
            self._check_url("slots.storage.config", storage.url, POSTGRES_URLS)
        self._check_query()
        size = behavior.retention_policy.max_size_gb
        return Namespace(
            name=entry.name,
            description=entry.description,
            mailbox=self._mailbox(),
            store=_database(storage),
            source=self._source(),
            envelope_validation=entry.schemas.envelope.validation,
            payload_schemas=tuple(self._payload_schemas(entry.schemas.payload)),
            batch_size=behavior.batch_size,
            max_retries=behavior.max_retries,
            history_retention_ms=self._retention_ms(),
            max_store_bytes=None if size is None else max(1, int(size * GB)),
        )

    def _source(self) -> MessageSource:
        slot = self._entry.slots.message_source
        place = "slots.message_source.config"
        if not slot.config.durable:
            raise self._refusal(
                f"{place}.durable",
                "is false, which would lose messages published while ingest is stopped; omit it or set it "
                "to true",
            )
        if isinstance(slot, NatsSlot) and not _CONSUMER.match(slot.config.consumer_group):
            raise self._refusal(
                f"{place}.consumer_group",
                f"is {slot.config.consumer_group!r}; a durable consumer's name has only letters, digits, - "
                "and _",
            )
        kind, urls = _SOURCES[type(slot)]
        if urls:
            self._check_url(place, slot.config.url, urls)
        values = {name: getattr(slot.config, name) for name in kind.__struct_fields__}
        try:
            return msgspec.convert(
                {name: str(value) if isinstance(value, Path) else value for name, value in values.items()},
                kind,
            )
        except InvalidRequest as error:
            raise self._refusal(place, f"is inconsistent: {str(error).rstrip('.')}") from error

    def _mailbox(self) -> str:
        name = self._entry.name
        configured = self._entry.slots.storage.config.mailbox
        place, mailbox = "name", f"{name}@{self._entry.slots.message_source.config.consumer_group}"
        if configured is not None:
            place, mailbox = "slots.storage.config.mailbox", configured
            if not configured.startswith(f"{name}@"):
                raise self._refusal(
                    place, f"is {configured!r}; a mailbox of namespace {name} begins with {name}@"
                )
        try:
            return check_mailbox(mailbox)
        except InvalidRequest as error:
            raise self._refusal(place, f"makes an invalid mailbox name: {str(error).rstrip('.')}") from error

    def _check_query(self) -> None:
        query = self._entry.slots.query
        storage = self._entry.slots.storage
        if query is not None and _database(query.config) != _database(storage.config):
            raise self._refusal(
                "slots.query.config",
                "names another database than slots.storage.config; name the same one, or omit the slot",
            )

    def _retention_ms(self) -> int | None:
        stored = self._entry.slots.storage.config.retention_days
        policy = self._entry.behavior.retention_policy.max_age_days
        if stored is not None and policy is not None and stored != policy:
            raise self._refusal(
                "behavior.retention_policy.max_age_days",
                f"is {policy}, but slots.storage.config.retention_days is {stored}; omit one of "
                "them or make them equal",
            )
        days = policy or stored
        return None if days is None else days * DAY_MS

    def _check_url(self, place: str, url: str, prefixes: tuple[str, ...]) -> None:
        if not url.startswith(prefixes):  # the message omits the URL: it may contain a password
            raise self._refusal(f"{place}.url", f"must begin with {join_with_or(prefixes)}")

    def _payload_schemas(self, payload: PayloadSchemas) -> Iterator[PayloadSchema]:
        for index, schema in enumerate(payload.schemas):
            place = f"schemas.payload.schemas[{index}]"
            format_ = schema.format or payload.format
            if format_ == SchemaFormat.PROTOBUF and schema.message_name is None:
                raise self._refusal(place, "has no message_name; a protobuf schema must have one")
            yield self._payload_schema(payload, schema, format_)

    def _payload_schema(
        self, payload: PayloadSchemas, schema: TopicSchema, format_: SchemaFormat
    ) -> PayloadSchema:
        is_shared = format_ == payload.format  # descriptors and JSON Schemas are different files
        return PayloadSchema(
            topic=schema.topic,
            format=format_,
            message_name=schema.message_name,
            file=schema.file or (payload.file if is_shared else None),
            validation=schema.validation or payload.validation,
            allows_unknown_fields=payload.compatibility in ("forward", "full"),
        )

    def _refusal(self, place: str, problem: str) -> InvalidRequest:
        return self._reader.refusal(f"{self._place}.{place}", problem)


def _database(config: SqliteConfig | PostgresConfig | SqliteQueryConfig | PostgresQueryConfig) -> str:
    if isinstance(config, SqliteConfig | SqliteQueryConfig):
        return str(config.database_path)
    return config.url


def _check_distinct(reader: YamlReader, namespaces: tuple[Namespace, ...]) -> None:
    indexes: dict[str, int] = {}  # mailboxes begin with these names, so they differ as well
    for index, namespace in enumerate(namespaces):
        if namespace.name in indexes:
            raise reader.refusal(
                f"namespaces[{index}].name",
                f"is {namespace.name!r}, as is namespaces[{indexes[namespace.name]}].name; rename one",
            )
        indexes[namespace.name] = index


_DURATION = re.compile(r"([0-9]{1,12})(ms|s|m|h)")
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def load_lease_policies(file: str | Path, default: LeasePolicy) -> dict[str, LeasePolicy]:
    """Return the lease policies of a YAML file by namespace (RFC-049 Lease TTL Configuration).

    Arguments:
        default: policy of a namespace whose section has no TTL.

    Raises: InvalidRequest with file, line and key.
    """
    reader = YamlReader(Path(file))
    policies: dict[str, LeasePolicy] = {}
    for index, entry in enumerate(reader.read(LeaseNamespaceFile).namespaces):
        if entry.name in policies:
            raise reader.refusal(f"namespaces[{index}].name", f"is {entry.name!r} again; rename one")
        policies[entry.name] = _read_policy(reader, entry, f"namespaces[{index}].lease", default)
    return policies


def _read_policy(
    reader: YamlReader, entry: LeaseNamespaceEntry, place: str, default: LeasePolicy
) -> LeasePolicy:
    values = {
        f"{name}_ms": _read_duration(reader, f"{place}.{name}", text)
        for name in ("ttl", "heartbeat_interval", "grace_period")
        if (text := getattr(entry.lease, name)) is not None
    }
    shares = scale_policy(default, values.get("ttl_ms", default.ttl_ms))
    try:
        return LeasePolicy(
            ttl_ms=shares.ttl_ms,
            heartbeat_interval_ms=values.get("heartbeat_interval_ms", shares.heartbeat_interval_ms),
            grace_period_ms=values.get("grace_period_ms", shares.grace_period_ms),
        ).validate()
    except InvalidRequest as error:
        raise reader.refusal(place, f"is inconsistent: {str(error).rstrip('.')}") from error


def _read_duration(reader: YamlReader, place: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise reader.refusal(place, f"is {text!r}; it must be a duration such as 300s")
    return int(match[1]) * _UNITS_MS[match[2]]
