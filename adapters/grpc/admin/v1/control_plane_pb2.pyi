import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("mailbox_id", "runner_id", "proxy_id", "partition", "address", "ttl_seconds")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    runner_id: str
    proxy_id: str
    partition: int
    address: str
    ttl_seconds: int
    def __init__(self, mailbox_id: _Optional[str] = ..., runner_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., partition: _Optional[int] = ..., address: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("success", "message", "lease_expires")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    lease_expires: _timestamp_pb2.Timestamp
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ..., lease_expires: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("mailbox_id", "runner_id")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    runner_id: str
    def __init__(self, mailbox_id: _Optional[str] = ..., runner_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("released", "message")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    released: bool
    message: str
    def __init__(self, released: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class MailboxHeartbeatRequest(_message.Message):
    __slots__ = ("mailbox_id", "runner_id", "proxy_id", "events_stored", "queries_served", "storage_size_bytes", "status")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_STORED_FIELD_NUMBER: _ClassVar[int]
    QUERIES_SERVED_FIELD_NUMBER: _ClassVar[int]
    STORAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    runner_id: str
    proxy_id: str
    events_stored: int
    queries_served: int
    storage_size_bytes: int
    status: str
    def __init__(self, mailbox_id: _Optional[str] = ..., runner_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., events_stored: _Optional[int] = ..., queries_served: _Optional[int] = ..., storage_size_bytes: _Optional[int] = ..., status: _Optional[str] = ...) -> None: ...

class MailboxHeartbeatResponse(_message.Message):
    __slots__ = ("lease_renewed", "message", "new_expiration")
    LEASE_RENEWED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NEW_EXPIRATION_FIELD_NUMBER: _ClassVar[int]
    lease_renewed: bool
    message: str
    new_expiration: _timestamp_pb2.Timestamp
    def __init__(self, lease_renewed: _Optional[bool] = ..., message: _Optional[str] = ..., new_expiration: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class MailboxRouteUpdate(_message.Message):
    __slots__ = ("mailbox_id", "proxy_id", "runner_id", "address", "partition")
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    proxy_id: str
    runner_id: str
    address: str
    partition: int
    def __init__(self, mailbox_id: _Optional[str] = ..., proxy_id: _Optional[str] = ..., runner_id: _Optional[str] = ..., address: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class MailboxRouteUpdateAck(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class MailboxRouteRemoval(_message.Message):
    __slots__ = ("mailbox_id",)
    MAILBOX_ID_FIELD_NUMBER: _ClassVar[int]
    mailbox_id: str
    def __init__(self, mailbox_id: _Optional[str] = ...) -> None: ...

class MailboxRouteRemovalAck(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...
