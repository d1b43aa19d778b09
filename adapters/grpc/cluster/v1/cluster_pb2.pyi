from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Route(_message.Message):
    __slots__ = ("mailbox_id", "proxy_id", "runner_id", "address", "partition", "position", "epoch")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    proxy_id: str
    runner_id: str
    address: str
    partition: int
    position: int
    epoch: int
    def __init__(self, mailbox_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., runner_id: _Optional[str] = ..., address: _Optional[str] = ..., partition: _Optional[int] = ..., position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class PartitionRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class RegisterProxyRequest(_message.Message):
    __slots__ = ("proxy_id", "address", "position", "push_key")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    address: str
    position: int
    push_key: str
    def __init__(self, proxy_id: _Optional[str] = ..., address: _Optional[str] = ..., position: _Optional[int] = ..., push_key: _Optional[str] = ...) -> None: ...

class RegisterProxyResponse(_message.Message):
    __slots__ = ("interval_ms", "ttl_ms", "partitions", "position", "table")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    ttl_ms: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionRange]
    position: int
    table: RoutingTable
    def __init__(self, interval_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionRange, _Mapping]]] = ..., position: _Optional[int] = ..., table: _Optional[_Union[RoutingTable, _Mapping]] = ...) -> None: ...

class RoutingTable(_message.Message):
    __slots__ = ("position", "routes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    position: int
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, position: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...

class RegisterRunnerRequest(_message.Message):
    __slots__ = ("runner_id", "proxy_id", "address", "mailbox_ids")
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_IDS_FIELD_NUMBER: _ClassVar[int]
    runner_id: str
    proxy_id: str
    address: str
    mailbox_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runner_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., address: _Optional[str] = ..., mailbox_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterRunnerResponse(_message.Message):
    __slots__ = ("interval_ms", "ttl_ms", "offers")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    ttl_ms: int
    offers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, interval_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., offers: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("proxy_id", "runner_id")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    runner_id: str
    def __init__(self, proxy_id: _Optional[str] = ..., runner_id: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("mailbox_id",)
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    def __init__(self, mailbox_id: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("mailbox_id", "runner_id", "proxy_id", "address", "partition", "epoch", "status", "ttl_ms", "grace_period_ms", "remaining_ms", "acquired_us", "renewed_us", "events_stored", "queries_served", "storage_size_bytes", "health")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_US_FIELD_NUMBER: _ClassVar[int]
    RENEWED_US_FIELD_NUMBER: _ClassVar[int]
    EVENTS_STORED_FIELD_NUMBER: _ClassVar[int]
    QUERIES_SERVED_FIELD_NUMBER: _ClassVar[int]
    STORAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    runner_id: str
    proxy_id: str
    address: str
    partition: int
    epoch: int
    status: str
    ttl_ms: int
    grace_period_ms: int
    remaining_ms: int
    acquired_us: int
    renewed_us: int
    events_stored: int
    queries_served: int
    storage_size_bytes: int
    health: str
    def __init__(self, mailbox_id: _Optional[str] = ..., runner_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., address: _Optional[str] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., status: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., grace_period_ms: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., acquired_us: _Optional[int] = ..., renewed_us: _Optional[int] = ..., events_stored: _Optional[int] = ..., queries_served: _Optional[int] = ..., storage_size_bytes: _Optional[int] = ..., health: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class ListRoutesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRoutesResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: RoutingTable
    def __init__(self, table: _Optional[_Union[RoutingTable, _Mapping]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "kind", "proxy_id", "address", "partitions", "seen_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    proxy_id: str
    address: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionRange]
    seen_ms: int
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., proxy_id: _Optional[str] = ..., address: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionRange, _Mapping]]] = ..., seen_ms: _Optional[int] = ...) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("position", "routes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    position: int
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, position: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...
