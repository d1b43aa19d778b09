from google.protobuf import struct_pb2 as _struct_pb2
from postroom.domain.envelope.v1 import envelope_pb2 as _envelope_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NewMessage(_message.Message):
    __slots__ = ("topic", "payload", "idem_key", "sticky_key", "attrs", "message_id", "deliver_after_ms", "ttl_seconds", "published_at_us", "content_type", "correlation_id", "causality_parent", "principal", "priority", "trace_id", "span_id", "schema_url", "schema_version", "unique_key", "on_conflict")
    class AttrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    IDEM_KEY_FIELD_NUMBER: _ClassVar[int]
    STICKY_KEY_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_US_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSALITY_PARENT_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_URL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_KEY_FIELD_NUMBER: _ClassVar[int]
    ON_CONFLICT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    payload: bytes
    idem_key: str
    sticky_key: str
    attrs: _containers.ScalarMap[str, bytes]
    message_id: str
    deliver_after_ms: int
    ttl_seconds: int
    published_at_us: int
    content_type: str
    correlation_id: str
    causality_parent: str
    principal: str
    priority: int
    trace_id: str
    span_id: str
    schema_url: str
    schema_version: str
    unique_key: str
    on_conflict: str
    def __init__(self, topic: _Optional[str] = ..., payload: _Optional[bytes] = ..., idem_key: _Optional[str] = ..., sticky_key: _Optional[str] = ..., attrs: _Optional[_Mapping[str, bytes]] = ..., message_id: _Optional[str] = ..., deliver_after_ms: _Optional[int] = ..., ttl_seconds: _Optional[int] = ..., published_at_us: _Optional[int] = ..., content_type: _Optional[str] = ..., correlation_id: _Optional[str] = ..., causality_parent: _Optional[str] = ..., principal: _Optional[str] = ..., priority: _Optional[int] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., schema_url: _Optional[str] = ..., schema_version: _Optional[str] = ..., unique_key: _Optional[str] = ..., on_conflict: _Optional[str] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: NewMessage
    def __init__(self, message: _Optional[_Union[NewMessage, _Mapping]] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ("message_id", "duplicate")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    duplicate: bool
    def __init__(self, message_id: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class SendBatchRequest(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ...) -> None: ...

class SendBatchResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SendResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SendResult, _Mapping]]] = ...) -> None: ...

class SendResult(_message.Message):
    __slots__ = ("sent", "error")
    SENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sent: SendResponse
    error: Error
    def __init__(self, sent: _Optional[_Union[SendResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class RecvRequest(_message.Message):
    __slots__ = ("topics", "visibility_ms", "max_messages", "max_bytes", "wait_ms", "consumer")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    visibility_ms: int
    max_messages: int
    max_bytes: int
    wait_ms: int
    consumer: str
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., visibility_ms: _Optional[int] = ..., max_messages: _Optional[int] = ..., max_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class RecvResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ReceivedMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ReceivedMessage, _Mapping]]] = ...) -> None: ...

class ReceivedMessage(_message.Message):
    __slots__ = ("message_id", "topic", "envelope", "receipt", "shard", "attempt", "visible_at_us", "idem_key", "payload_hash", "hash_chain", "published_topic", "ordered_key")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_AT_US_FIELD_NUMBER: _ClassVar[int]
    IDEM_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_CHAIN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_TOPIC_FIELD_NUMBER: _ClassVar[int]
    ORDERED_KEY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    envelope: _envelope_pb2.PrismEnvelope
    receipt: str
    shard: int
    attempt: int
    visible_at_us: int
    idem_key: str
    payload_hash: bytes
    hash_chain: bytes
    published_topic: str
    ordered_key: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., envelope: _Optional[_Union[_envelope_pb2.PrismEnvelope, _Mapping]] = ..., receipt: _Optional[str] = ..., shard: _Optional[int] = ..., attempt: _Optional[int] = ..., visible_at_us: _Optional[int] = ..., idem_key: _Optional[str] = ..., payload_hash: _Optional[bytes] = ..., hash_chain: _Optional[bytes] = ..., published_topic: _Optional[str] = ..., ordered_key: _Optional[str] = ...) -> None: ...

class RecvStreamRequest(_message.Message):
    __slots__ = ("topics", "visibility_ms", "max_messages", "max_bytes", "heartbeat_ms", "consumer")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    visibility_ms: int
    max_messages: int
    max_bytes: int
    heartbeat_ms: int
    consumer: str
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., visibility_ms: _Optional[int] = ..., max_messages: _Optional[int] = ..., max_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class RecvStreamResponse(_message.Message):
    __slots__ = ("delivery", "heartbeat", "error")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    delivery: RecvResponse
    heartbeat: Heartbeat
    error: Error
    def __init__(self, delivery: _Optional[_Union[RecvResponse, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("receipts", "results")
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: MessageResult
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[MessageResult, _Mapping]] = ...) -> None: ...
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedScalarFieldContainer[str]
    results: _containers.MessageMap[int, MessageResult]
    def __init__(self, receipts: _Optional[_Iterable[str]] = ..., results: _Optional[_Mapping[int, MessageResult]] = ...) -> None: ...

class MessageResult(_message.Message):
    __slots__ = ("payload", "content_type")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    content_type: str
    def __init__(self, payload: _Optional[bytes] = ..., content_type: _Optional[str] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SettleResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SettleResult, _Mapping]]] = ...) -> None: ...

class SettleResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("receipts", "reason", "delay_ms", "action", "traceback")
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    delay_ms: int
    action: str
    traceback: str
    def __init__(self, receipts: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., delay_ms: _Optional[int] = ..., action: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SettleResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SettleResult, _Mapping]]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("receipts", "visibility_ms")
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedScalarFieldContainer[str]
    visibility_ms: int
    def __init__(self, receipts: _Optional[_Iterable[str]] = ..., visibility_ms: _Optional[int] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SettleResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SettleResult, _Mapping]]] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("start_time", "end_time", "topics", "principals", "statuses", "message_id", "correlation_id", "trace_id", "namespace", "headers", "text", "match", "order", "limit", "offset", "cursor")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    start_time: int
    end_time: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    principals: _containers.RepeatedScalarFieldContainer[str]
    statuses: _containers.RepeatedScalarFieldContainer[str]
    message_id: str
    correlation_id: str
    trace_id: str
    namespace: str
    headers: _containers.ScalarMap[str, str]
    text: str
    match: str
    order: str
    limit: int
    offset: int
    cursor: str
    def __init__(self, start_time: _Optional[int] = ..., end_time: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., principals: _Optional[_Iterable[str]] = ..., statuses: _Optional[_Iterable[str]] = ..., message_id: _Optional[str] = ..., correlation_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., namespace: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., text: _Optional[str] = ..., match: _Optional[str] = ..., order: _Optional[str] = ..., limit: _Optional[int] = ..., offset: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("items", "next_cursor")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FoundMessage]
    next_cursor: str
    def __init__(self, items: _Optional[_Iterable[_Union[FoundMessage, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class FoundMessage(_message.Message):
    __slots__ = ("item", "mailbox", "position", "status", "attempts", "shard")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    item: MailboxItem
    mailbox: str
    position: int
    status: str
    attempts: int
    shard: int
    def __init__(self, item: _Optional[_Union[MailboxItem, _Mapping]] = ..., mailbox: _Optional[str] = ..., position: _Optional[int] = ..., status: _Optional[str] = ..., attempts: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("message_id",)
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    def __init__(self, message_id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("mailbox", "message_id", "topic", "shard", "status", "attempt", "redriven", "reason", "last_error", "intact", "item", "history", "erased", "stream_id", "result", "copy_of", "traceback")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    INTACT_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    COPY_OF_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    message_id: str
    topic: str
    shard: int
    status: str
    attempt: int
    redriven: int
    reason: str
    last_error: str
    intact: bool
    item: MailboxItem
    history: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    erased: bool
    stream_id: str
    result: MessageResult
    copy_of: str
    traceback: str
    def __init__(self, mailbox: _Optional[str] = ..., message_id: _Optional[str] = ..., topic: _Optional[str] = ..., shard: _Optional[int] = ..., status: _Optional[str] = ..., attempt: _Optional[int] = ..., redriven: _Optional[int] = ..., reason: _Optional[str] = ..., last_error: _Optional[str] = ..., intact: _Optional[bool] = ..., item: _Optional[_Union[MailboxItem, _Mapping]] = ..., history: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., erased: _Optional[bool] = ..., stream_id: _Optional[str] = ..., result: _Optional[_Union[MessageResult, _Mapping]] = ..., copy_of: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class WaitForResultRequest(_message.Message):
    __slots__ = ("message_id", "wait_ms")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    wait_ms: int
    def __init__(self, message_id: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class WaitForResultResponse(_message.Message):
    __slots__ = ("message_id", "topic", "status", "reason", "last_error", "result", "erased")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    status: str
    reason: str
    last_error: str
    result: MessageResult
    erased: bool
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., last_error: _Optional[str] = ..., result: _Optional[_Union[MessageResult, _Mapping]] = ..., erased: _Optional[bool] = ...) -> None: ...

class MailboxItem(_message.Message):
    __slots__ = ("message_id", "timestamp", "topic", "content_type", "schema_url", "schema_version", "encryption", "correlation_id", "principal", "namespace", "trace_id", "span_id", "custom_headers", "envelope_blob")
    class CustomHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_URL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_HEADERS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_BLOB_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    timestamp: int
    topic: str
    content_type: str
    schema_url: str
    schema_version: str
    encryption: str
    correlation_id: str
    principal: str
    namespace: str
    trace_id: str
    span_id: str
    custom_headers: _containers.ScalarMap[str, str]
    envelope_blob: bytes
    def __init__(self, message_id: _Optional[str] = ..., timestamp: _Optional[int] = ..., topic: _Optional[str] = ..., content_type: _Optional[str] = ..., schema_url: _Optional[str] = ..., schema_version: _Optional[str] = ..., encryption: _Optional[str] = ..., correlation_id: _Optional[str] = ..., principal: _Optional[str] = ..., namespace: _Optional[str] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., custom_headers: _Optional[_Mapping[str, str]] = ..., envelope_blob: _Optional[bytes] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("position", "at", "event", "epoch", "facts")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    position: int
    at: str
    event: str
    epoch: int
    facts: _struct_pb2.Struct
    def __init__(self, position: _Optional[int] = ..., at: _Optional[str] = ..., event: _Optional[str] = ..., epoch: _Optional[int] = ..., facts: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class BacklogRequest(_message.Message):
    __slots__ = ("topic", "at")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    at: Moment
    def __init__(self, topic: _Optional[str] = ..., at: _Optional[_Union[Moment, _Mapping]] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("position", "time")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    position: int
    time: str
    def __init__(self, position: _Optional[int] = ..., time: _Optional[str] = ...) -> None: ...

class BacklogResponse(_message.Message):
    __slots__ = ("mailbox", "position", "epoch", "owner", "at", "archived", "as_of", "shards", "paused_topics", "dlq_profile")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ARCHIVED_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_TOPICS_FIELD_NUMBER: _ClassVar[int]
    DLQ_PROFILE_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    position: int
    epoch: int
    owner: str
    at: str
    archived: int
    as_of: str
    shards: _containers.RepeatedCompositeFieldContainer[ShardCount]
    paused_topics: _containers.RepeatedScalarFieldContainer[str]
    dlq_profile: str
    def __init__(self, mailbox: _Optional[str] = ..., position: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., at: _Optional[str] = ..., archived: _Optional[int] = ..., as_of: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[ShardCount, _Mapping]]] = ..., paused_topics: _Optional[_Iterable[str]] = ..., dlq_profile: _Optional[str] = ...) -> None: ...

class ShardCount(_message.Message):
    __slots__ = ("topic", "shard", "ready", "in_flight", "delayed", "dead", "oldest_at")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int
    def __init__(self, topic: _Optional[str] = ..., shard: _Optional[int] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., delayed: _Optional[int] = ..., dead: _Optional[int] = ..., oldest_at: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("mailbox",)
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    def __init__(self, mailbox: _Optional[str] = ...) -> None: ...

class RedriveRequest(_message.Message):
    __slots__ = ("topic", "limit", "reason", "only")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    reason: str
    only: MessageIds
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ..., reason: _Optional[str] = ..., only: _Optional[_Union[MessageIds, _Mapping]] = ...) -> None: ...

class MessageIds(_message.Message):
    __slots__ = ("message_ids",)
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, message_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RedriveResponse(_message.Message):
    __slots__ = ("redriven",)
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    redriven: int
    def __init__(self, redriven: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("topic", "dead", "ready")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    dead: bool
    ready: bool
    def __init__(self, topic: _Optional[str] = ..., dead: _Optional[bool] = ..., ready: _Optional[bool] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class RedriveSpec(_message.Message):
    __slots__ = ("action", "topics", "reasons", "fingerprints", "message_ids", "dead_since", "dead_until", "start_time", "end_time", "principals", "correlation_id", "trace_id", "namespace", "headers", "text", "match", "rate", "delay_ms", "limit", "destination", "set_headers", "remove_headers", "merge_patch", "keys", "at", "note", "statuses")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SetHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    DEAD_SINCE_FIELD_NUMBER: _ClassVar[int]
    DEAD_UNTIL_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SET_HEADERS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    MERGE_PATCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    action: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    fingerprints: _containers.RepeatedScalarFieldContainer[str]
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    dead_since: int
    dead_until: int
    start_time: int
    end_time: int
    principals: _containers.RepeatedScalarFieldContainer[str]
    correlation_id: str
    trace_id: str
    namespace: str
    headers: _containers.ScalarMap[str, str]
    text: str
    match: str
    rate: int
    delay_ms: int
    limit: int
    destination: str
    set_headers: _containers.ScalarMap[str, str]
    remove_headers: _containers.RepeatedScalarFieldContainer[str]
    merge_patch: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    at: int
    note: str
    statuses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, action: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., reasons: _Optional[_Iterable[str]] = ..., fingerprints: _Optional[_Iterable[str]] = ..., message_ids: _Optional[_Iterable[str]] = ..., dead_since: _Optional[int] = ..., dead_until: _Optional[int] = ..., start_time: _Optional[int] = ..., end_time: _Optional[int] = ..., principals: _Optional[_Iterable[str]] = ..., correlation_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., namespace: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., text: _Optional[str] = ..., match: _Optional[str] = ..., rate: _Optional[int] = ..., delay_ms: _Optional[int] = ..., limit: _Optional[int] = ..., destination: _Optional[str] = ..., set_headers: _Optional[_Mapping[str, str]] = ..., remove_headers: _Optional[_Iterable[str]] = ..., merge_patch: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., at: _Optional[int] = ..., note: _Optional[str] = ..., statuses: _Optional[_Iterable[str]] = ...) -> None: ...

class RedriveReport(_message.Message):
    __slots__ = ("mailbox", "job_id", "status", "spec", "cutoff", "matched", "moved", "skipped", "restored", "retained", "principal", "started_at", "changed_at")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CUTOFF_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    job_id: str
    status: str
    spec: RedriveSpec
    cutoff: int
    matched: int
    moved: int
    skipped: int
    restored: int
    retained: int
    principal: str
    started_at: str
    changed_at: str
    def __init__(self, mailbox: _Optional[str] = ..., job_id: _Optional[str] = ..., status: _Optional[str] = ..., spec: _Optional[_Union[RedriveSpec, _Mapping]] = ..., cutoff: _Optional[int] = ..., matched: _Optional[int] = ..., moved: _Optional[int] = ..., skipped: _Optional[int] = ..., restored: _Optional[int] = ..., retained: _Optional[int] = ..., principal: _Optional[str] = ..., started_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class RedriveGroup(_message.Message):
    __slots__ = ("topic", "reason", "fingerprint", "count", "last_error")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    reason: str
    fingerprint: str
    count: int
    last_error: str
    def __init__(self, topic: _Optional[str] = ..., reason: _Optional[str] = ..., fingerprint: _Optional[str] = ..., count: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class PreviewRedriveRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: RedriveSpec
    def __init__(self, spec: _Optional[_Union[RedriveSpec, _Mapping]] = ...) -> None: ...

class PreviewRedriveResponse(_message.Message):
    __slots__ = ("mailbox", "cutoff", "matched", "groups", "samples", "digest")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    CUTOFF_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    cutoff: int
    matched: int
    groups: _containers.RepeatedCompositeFieldContainer[RedriveGroup]
    samples: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    digest: str
    def __init__(self, mailbox: _Optional[str] = ..., cutoff: _Optional[int] = ..., matched: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[RedriveGroup, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class StartRedriveRequest(_message.Message):
    __slots__ = ("spec", "job_id", "cutoff", "previewed")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CUTOFF_FIELD_NUMBER: _ClassVar[int]
    PREVIEWED_FIELD_NUMBER: _ClassVar[int]
    spec: RedriveSpec
    job_id: str
    cutoff: int
    previewed: int
    def __init__(self, spec: _Optional[_Union[RedriveSpec, _Mapping]] = ..., job_id: _Optional[str] = ..., cutoff: _Optional[int] = ..., previewed: _Optional[int] = ...) -> None: ...

class StartRedriveResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: RedriveReport
    def __init__(self, job: _Optional[_Union[RedriveReport, _Mapping]] = ...) -> None: ...

class ListRedrivesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRedrivesResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[RedriveReport]
    def __init__(self, jobs: _Optional[_Iterable[_Union[RedriveReport, _Mapping]]] = ...) -> None: ...

class GetRedriveRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetRedriveResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: RedriveReport
    def __init__(self, job: _Optional[_Union[RedriveReport, _Mapping]] = ...) -> None: ...

class ListRedriveMessagesRequest(_message.Message):
    __slots__ = ("job_id", "outcome", "cursor", "limit")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    outcome: str
    cursor: str
    limit: int
    def __init__(self, job_id: _Optional[str] = ..., outcome: _Optional[str] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRedriveMessagesResponse(_message.Message):
    __slots__ = ("messages", "next_cursor")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[RedriveMessage]
    next_cursor: str
    def __init__(self, messages: _Optional[_Iterable[_Union[RedriveMessage, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class RedriveMessage(_message.Message):
    __slots__ = ("message_id", "topic", "outcome", "reason", "copy_id", "at", "status")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COPY_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    outcome: str
    reason: str
    copy_id: str
    at: str
    status: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., copy_id: _Optional[str] = ..., at: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class ChangeRedriveRequest(_message.Message):
    __slots__ = ("job_id", "action")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    action: str
    def __init__(self, job_id: _Optional[str] = ..., action: _Optional[str] = ...) -> None: ...

class ChangeRedriveResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: RedriveReport
    def __init__(self, job: _Optional[_Union[RedriveReport, _Mapping]] = ...) -> None: ...

class CancelMessagesRequest(_message.Message):
    __slots__ = ("ids", "reason")
    IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelMessagesResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[MessageChange]
    def __init__(self, messages: _Optional[_Iterable[_Union[MessageChange, _Mapping]]] = ...) -> None: ...

class RescheduleMessagesRequest(_message.Message):
    __slots__ = ("ids", "deliver_after_ms", "at")
    IDS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    deliver_after_ms: int
    at: Moment
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., deliver_after_ms: _Optional[int] = ..., at: _Optional[_Union[Moment, _Mapping]] = ...) -> None: ...

class RescheduleMessagesResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[MessageChange]
    def __init__(self, messages: _Optional[_Iterable[_Union[MessageChange, _Mapping]]] = ...) -> None: ...

class MessageChange(_message.Message):
    __slots__ = ("message_id", "outcome")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    outcome: str
    def __init__(self, message_id: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("topic", "reason", "limit", "cursor", "at", "held_keys")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    HELD_KEYS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    reason: str
    limit: int
    cursor: int
    at: Moment
    held_keys: bool
    def __init__(self, topic: _Optional[str] = ..., reason: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[int] = ..., at: _Optional[_Union[Moment, _Mapping]] = ..., held_keys: _Optional[bool] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters", "next_cursor")
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    next_cursor: str
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("mailbox", "topic", "shard", "message_id", "reason", "attempt", "last_error", "first_seen", "last_seen", "redriven", "position", "held_key", "waiting")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEEN_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HELD_KEY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    topic: str
    shard: int
    message_id: str
    reason: str
    attempt: int
    last_error: str
    first_seen: str
    last_seen: str
    redriven: int
    position: int
    held_key: str
    waiting: int
    def __init__(self, mailbox: _Optional[str] = ..., topic: _Optional[str] = ..., shard: _Optional[int] = ..., message_id: _Optional[str] = ..., reason: _Optional[str] = ..., attempt: _Optional[int] = ..., last_error: _Optional[str] = ..., first_seen: _Optional[str] = ..., last_seen: _Optional[str] = ..., redriven: _Optional[int] = ..., position: _Optional[int] = ..., held_key: _Optional[str] = ..., waiting: _Optional[int] = ...) -> None: ...

class PeekRequest(_message.Message):
    __slots__ = ("topic", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class PeekResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[PeekedMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[PeekedMessage, _Mapping]]] = ...) -> None: ...

class PeekedMessage(_message.Message):
    __slots__ = ("message_id", "topic", "shard", "attempts", "sent_at", "attrs", "payload")
    class AttrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    shard: int
    attempts: int
    sent_at: str
    attrs: _containers.ScalarMap[str, str]
    payload: bytes
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., shard: _Optional[int] = ..., attempts: _Optional[int] = ..., sent_at: _Optional[str] = ..., attrs: _Optional[_Mapping[str, str]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("message_id",)
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    def __init__(self, message_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("mailbox", "message_id", "topic", "shard", "now", "deliveries", "story")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    message_id: str
    topic: str
    shard: int
    now: str
    deliveries: _containers.RepeatedCompositeFieldContainer[DeliveryExplanation]
    story: _containers.RepeatedCompositeFieldContainer[HistoryStep]
    def __init__(self, mailbox: _Optional[str] = ..., message_id: _Optional[str] = ..., topic: _Optional[str] = ..., shard: _Optional[int] = ..., now: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[DeliveryExplanation, _Mapping]]] = ..., story: _Optional[_Iterable[_Union[HistoryStep, _Mapping]]] = ...) -> None: ...

class DeliveryExplanation(_message.Message):
    __slots__ = ("number", "attempt", "position", "at", "consumer", "epoch", "visible_again", "ended", "ended_position", "ended_at", "error", "why", "principal", "capability")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_AGAIN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ENDED_POSITION_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    number: int
    attempt: int
    position: int
    at: str
    consumer: str
    epoch: int
    visible_again: str
    ended: str
    ended_position: int
    ended_at: str
    error: str
    why: str
    principal: str
    capability: str
    def __init__(self, number: _Optional[int] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., at: _Optional[str] = ..., consumer: _Optional[str] = ..., epoch: _Optional[int] = ..., visible_again: _Optional[str] = ..., ended: _Optional[str] = ..., ended_position: _Optional[int] = ..., ended_at: _Optional[str] = ..., error: _Optional[str] = ..., why: _Optional[str] = ..., principal: _Optional[str] = ..., capability: _Optional[str] = ...) -> None: ...

class HistoryStep(_message.Message):
    __slots__ = ("position", "at", "text")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    position: int
    at: str
    text: str
    def __init__(self, position: _Optional[int] = ..., at: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GetTopicPolicyRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class GetTopicPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: TopicPolicy
    def __init__(self, policy: _Optional[_Union[TopicPolicy, _Mapping]] = ...) -> None: ...

class SetTopicPolicyRequest(_message.Message):
    __slots__ = ("topic", "policy", "unset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UNSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    policy: TopicPolicy
    unset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., unset: _Optional[_Iterable[str]] = ...) -> None: ...

class SetTopicPolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSettingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSettingsResponse(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _struct_pb2.Struct
    def __init__(self, settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class PreviewSettingsRequest(_message.Message):
    __slots__ = ("changes", "replace")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    changes: _struct_pb2.Struct
    replace: bool
    def __init__(self, changes: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., replace: _Optional[bool] = ...) -> None: ...

class PreviewSettingsResponse(_message.Message):
    __slots__ = ("before", "after", "effects")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    before: _struct_pb2.Struct
    after: _struct_pb2.Struct
    effects: _containers.RepeatedCompositeFieldContainer[SettingsEffect]
    def __init__(self, before: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., after: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., effects: _Optional[_Iterable[_Union[SettingsEffect, _Mapping]]] = ...) -> None: ...

class SettingsEffect(_message.Message):
    __slots__ = ("topic", "effect", "count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    effect: str
    count: int
    def __init__(self, topic: _Optional[str] = ..., effect: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class SetSettingsRequest(_message.Message):
    __slots__ = ("changes", "replace")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    changes: _struct_pb2.Struct
    replace: bool
    def __init__(self, changes: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., replace: _Optional[bool] = ...) -> None: ...

class SetSettingsResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class TopicPolicy(_message.Message):
    __slots__ = ("shards", "shard_capacity", "visibility_ms", "max_attempts", "backoff_base_ms", "backoff_max_ms", "replay_window_ms", "replay_capacity", "ready_retention_ms", "in_flight_retention_visibilities", "dead_retention_ms", "dead_capacity", "priorities", "priority_aging_ms", "ordered_keys", "dead_letters_hold_keys", "fair_keys", "max_in_flight", "max_in_flight_per_key", "rate", "rate_per_key", "rate_period_ms", "rate_burst", "subscriptions_only", "key_batch", "key_weights", "shared_limits")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_BASE_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    READY_RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_RETENTION_VISIBILITIES_FIELD_NUMBER: _ClassVar[int]
    DEAD_RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_AGING_MS_FIELD_NUMBER: _ClassVar[int]
    ORDERED_KEYS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_HOLD_KEYS_FIELD_NUMBER: _ClassVar[int]
    FAIR_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_PER_KEY_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    RATE_PER_KEY_FIELD_NUMBER: _ClassVar[int]
    RATE_PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    RATE_BURST_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEY_BATCH_FIELD_NUMBER: _ClassVar[int]
    KEY_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_LIMITS_FIELD_NUMBER: _ClassVar[int]
    shards: int
    shard_capacity: int
    visibility_ms: int
    max_attempts: int
    backoff_base_ms: int
    backoff_max_ms: int
    replay_window_ms: int
    replay_capacity: int
    ready_retention_ms: int
    in_flight_retention_visibilities: int
    dead_retention_ms: int
    dead_capacity: int
    priorities: bool
    priority_aging_ms: int
    ordered_keys: bool
    dead_letters_hold_keys: bool
    fair_keys: bool
    max_in_flight: int
    max_in_flight_per_key: int
    rate: int
    rate_per_key: int
    rate_period_ms: int
    rate_burst: int
    subscriptions_only: bool
    key_batch: int
    key_weights: _struct_pb2.Struct
    shared_limits: bool
    def __init__(self, shards: _Optional[int] = ..., shard_capacity: _Optional[int] = ..., visibility_ms: _Optional[int] = ..., max_attempts: _Optional[int] = ..., backoff_base_ms: _Optional[int] = ..., backoff_max_ms: _Optional[int] = ..., replay_window_ms: _Optional[int] = ..., replay_capacity: _Optional[int] = ..., ready_retention_ms: _Optional[int] = ..., in_flight_retention_visibilities: _Optional[int] = ..., dead_retention_ms: _Optional[int] = ..., dead_capacity: _Optional[int] = ..., priorities: _Optional[bool] = ..., priority_aging_ms: _Optional[int] = ..., ordered_keys: _Optional[bool] = ..., dead_letters_hold_keys: _Optional[bool] = ..., fair_keys: _Optional[bool] = ..., max_in_flight: _Optional[int] = ..., max_in_flight_per_key: _Optional[int] = ..., rate: _Optional[int] = ..., rate_per_key: _Optional[int] = ..., rate_period_ms: _Optional[int] = ..., rate_burst: _Optional[int] = ..., subscriptions_only: _Optional[bool] = ..., key_batch: _Optional[int] = ..., key_weights: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shared_limits: _Optional[bool] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicSummary]
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicSummary, _Mapping]]] = ...) -> None: ...

class TopicSummary(_message.Message):
    __slots__ = ("topic", "paused", "policy", "ready", "in_flight", "delayed", "dead", "oldest_at", "dead_letterings", "shards_in_use", "held_keys", "receivers")
    class DeadLetteringsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AT_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERINGS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    HELD_KEYS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    paused: bool
    policy: TopicPolicy
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int
    dead_letterings: _containers.ScalarMap[str, int]
    shards_in_use: int
    held_keys: int
    receivers: int
    def __init__(self, topic: _Optional[str] = ..., paused: _Optional[bool] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., delayed: _Optional[int] = ..., dead: _Optional[int] = ..., oldest_at: _Optional[int] = ..., dead_letterings: _Optional[_Mapping[str, int]] = ..., shards_in_use: _Optional[int] = ..., held_keys: _Optional[int] = ..., receivers: _Optional[int] = ...) -> None: ...

class DescribeTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class DescribeTopicResponse(_message.Message):
    __slots__ = ("summary", "policy", "sections", "subscriptions", "consumers", "keys", "periods", "events")
    class SectionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    summary: TopicSummary
    policy: TopicPolicy
    sections: _containers.ScalarMap[str, str]
    subscriptions: _containers.RepeatedScalarFieldContainer[str]
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerReport]
    keys: _containers.RepeatedCompositeFieldContainer[KeyCount]
    periods: _containers.RepeatedCompositeFieldContainer[TopicPeriod]
    events: int
    def __init__(self, summary: _Optional[_Union[TopicSummary, _Mapping]] = ..., policy: _Optional[_Union[TopicPolicy, _Mapping]] = ..., sections: _Optional[_Mapping[str, str]] = ..., subscriptions: _Optional[_Iterable[str]] = ..., consumers: _Optional[_Iterable[_Union[ConsumerReport, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[KeyCount, _Mapping]]] = ..., periods: _Optional[_Iterable[_Union[TopicPeriod, _Mapping]]] = ..., events: _Optional[int] = ...) -> None: ...

class ConsumerReport(_message.Message):
    __slots__ = ("consumer", "topic", "receivers", "in_flight", "in_flight_since", "received", "acked", "failed", "work_p50_ms", "work_p95_ms", "last_error", "first_received", "last_received", "principal")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_SINCE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WORK_P50_MS_FIELD_NUMBER: _ClassVar[int]
    WORK_P95_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    FIRST_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    consumer: str
    topic: str
    receivers: int
    in_flight: int
    in_flight_since: str
    received: int
    acked: int
    failed: int
    work_p50_ms: float
    work_p95_ms: float
    last_error: str
    first_received: str
    last_received: str
    principal: str
    def __init__(self, consumer: _Optional[str] = ..., topic: _Optional[str] = ..., receivers: _Optional[int] = ..., in_flight: _Optional[int] = ..., in_flight_since: _Optional[str] = ..., received: _Optional[int] = ..., acked: _Optional[int] = ..., failed: _Optional[int] = ..., work_p50_ms: _Optional[float] = ..., work_p95_ms: _Optional[float] = ..., last_error: _Optional[str] = ..., first_received: _Optional[str] = ..., last_received: _Optional[str] = ..., principal: _Optional[str] = ...) -> None: ...

class KeyCount(_message.Message):
    __slots__ = ("key", "waiting", "in_flight", "is_held", "is_limited")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    IS_LIMITED_FIELD_NUMBER: _ClassVar[int]
    key: str
    waiting: int
    in_flight: int
    is_held: bool
    is_limited: bool
    def __init__(self, key: _Optional[str] = ..., waiting: _Optional[int] = ..., in_flight: _Optional[int] = ..., is_held: _Optional[bool] = ..., is_limited: _Optional[bool] = ...) -> None: ...

class TopicPeriod(_message.Message):
    __slots__ = ("period_ms", "since", "is_whole", "seconds", "sent", "received", "acked", "failed", "dead", "queue_p50_ms", "queue_p95_ms", "queue_p99_ms", "work_p50_ms", "work_p95_ms", "work_p99_ms", "total_p50_ms", "total_p95_ms", "total_p99_ms", "step_ms", "steps")
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_P50_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_P95_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_P99_MS_FIELD_NUMBER: _ClassVar[int]
    WORK_P50_MS_FIELD_NUMBER: _ClassVar[int]
    WORK_P95_MS_FIELD_NUMBER: _ClassVar[int]
    WORK_P99_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P95_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P99_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    since: str
    is_whole: bool
    seconds: float
    sent: int
    received: int
    acked: int
    failed: int
    dead: int
    queue_p50_ms: float
    queue_p95_ms: float
    queue_p99_ms: float
    work_p50_ms: float
    work_p95_ms: float
    work_p99_ms: float
    total_p50_ms: float
    total_p95_ms: float
    total_p99_ms: float
    step_ms: int
    steps: _containers.RepeatedCompositeFieldContainer[TopicStep]
    def __init__(self, period_ms: _Optional[int] = ..., since: _Optional[str] = ..., is_whole: _Optional[bool] = ..., seconds: _Optional[float] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ..., acked: _Optional[int] = ..., failed: _Optional[int] = ..., dead: _Optional[int] = ..., queue_p50_ms: _Optional[float] = ..., queue_p95_ms: _Optional[float] = ..., queue_p99_ms: _Optional[float] = ..., work_p50_ms: _Optional[float] = ..., work_p95_ms: _Optional[float] = ..., work_p99_ms: _Optional[float] = ..., total_p50_ms: _Optional[float] = ..., total_p95_ms: _Optional[float] = ..., total_p99_ms: _Optional[float] = ..., step_ms: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TopicStep, _Mapping]]] = ...) -> None: ...

class TopicStep(_message.Message):
    __slots__ = ("at", "sent", "acked", "failed", "dead", "total_p50_ms", "total_p95_ms", "total_p99_ms")
    AT_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P95_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_P99_MS_FIELD_NUMBER: _ClassVar[int]
    at: str
    sent: int
    acked: int
    failed: int
    dead: int
    total_p50_ms: float
    total_p95_ms: float
    total_p99_ms: float
    def __init__(self, at: _Optional[str] = ..., sent: _Optional[int] = ..., acked: _Optional[int] = ..., failed: _Optional[int] = ..., dead: _Optional[int] = ..., total_p50_ms: _Optional[float] = ..., total_p95_ms: _Optional[float] = ..., total_p99_ms: _Optional[float] = ...) -> None: ...

class ListConsumersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListConsumersResponse(_message.Message):
    __slots__ = ("consumers",)
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerReport]
    def __init__(self, consumers: _Optional[_Iterable[_Union[ConsumerReport, _Mapping]]] = ...) -> None: ...

class HandlerState(_message.Message):
    __slots__ = ("topic", "handler", "consumer", "concurrency", "in_use", "handled", "failed")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    HANDLER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    handler: str
    consumer: str
    concurrency: int
    in_use: int
    handled: int
    failed: int
    def __init__(self, topic: _Optional[str] = ..., handler: _Optional[str] = ..., consumer: _Optional[str] = ..., concurrency: _Optional[int] = ..., in_use: _Optional[int] = ..., handled: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("name", "host", "process", "version", "postroom_version", "uptime_ms", "handlers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POSTROOM_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    HANDLERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    host: str
    process: int
    version: str
    postroom_version: str
    uptime_ms: int
    handlers: _containers.RepeatedCompositeFieldContainer[HandlerState]
    def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., process: _Optional[int] = ..., version: _Optional[str] = ..., postroom_version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., handlers: _Optional[_Iterable[_Union[HandlerState, _Mapping]]] = ...) -> None: ...

class ReportWorkerRequest(_message.Message):
    __slots__ = ("id", "worker", "ended")
    ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    id: str
    worker: WorkerState
    ended: bool
    def __init__(self, id: _Optional[str] = ..., worker: _Optional[_Union[WorkerState, _Mapping]] = ..., ended: _Optional[bool] = ...) -> None: ...

class ReportWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("id", "name", "host", "process", "version", "postroom_version", "started_at", "silent_ms", "is_stale", "principal", "handlers")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POSTROOM_VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    IS_STALE_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    HANDLERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    host: str
    process: int
    version: str
    postroom_version: str
    started_at: str
    silent_ms: int
    is_stale: bool
    principal: str
    handlers: _containers.RepeatedCompositeFieldContainer[HandlerState]
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., process: _Optional[int] = ..., version: _Optional[str] = ..., postroom_version: _Optional[str] = ..., started_at: _Optional[str] = ..., silent_ms: _Optional[int] = ..., is_stale: _Optional[bool] = ..., principal: _Optional[str] = ..., handlers: _Optional[_Iterable[_Union[HandlerState, _Mapping]]] = ...) -> None: ...

class PauseTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class PauseTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ResumeTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscriptionFilter(_message.Message):
    __slots__ = ("topics", "headers")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    headers: _containers.ScalarMap[str, str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., headers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SubscriptionReport(_message.Message):
    __slots__ = ("name", "topics", "headers", "status", "position", "behind", "skipped", "ready", "in_flight", "dead", "paused", "created_at", "missing_in", "differs_in", "problem")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    MISSING_IN_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_IN_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    headers: _containers.ScalarMap[str, str]
    status: str
    position: int
    behind: int
    skipped: int
    ready: int
    in_flight: int
    dead: int
    paused: bool
    created_at: str
    missing_in: _containers.RepeatedScalarFieldContainer[str]
    differs_in: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    def __init__(self, name: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., headers: _Optional[_Mapping[str, str]] = ..., status: _Optional[str] = ..., position: _Optional[int] = ..., behind: _Optional[int] = ..., skipped: _Optional[int] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., dead: _Optional[int] = ..., paused: _Optional[bool] = ..., created_at: _Optional[str] = ..., missing_in: _Optional[_Iterable[str]] = ..., differs_in: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ...) -> None: ...

class SetSubscriptionRequest(_message.Message):
    __slots__ = ("name", "filter", "start", "if_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    filter: SubscriptionFilter
    start: Moment
    if_missing: bool
    def __init__(self, name: _Optional[str] = ..., filter: _Optional[_Union[SubscriptionFilter, _Mapping]] = ..., start: _Optional[_Union[Moment, _Mapping]] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class SetSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: SubscriptionReport
    def __init__(self, subscription: _Optional[_Union[SubscriptionReport, _Mapping]] = ...) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions",)
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionReport]
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[SubscriptionReport, _Mapping]]] = ...) -> None: ...

class RewindSubscriptionRequest(_message.Message):
    __slots__ = ("name", "start", "dry_run")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: Moment
    dry_run: bool
    def __init__(self, name: _Optional[str] = ..., start: _Optional[_Union[Moment, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RewindSubscriptionResponse(_message.Message):
    __slots__ = ("name", "position", "removed", "copied")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    removed: int
    copied: int
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ..., removed: _Optional[int] = ..., copied: _Optional[int] = ...) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("name", "dry_run")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    name: str
    dry_run: bool
    def __init__(self, name: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class DeleteSubscriptionResponse(_message.Message):
    __slots__ = ("left", "name", "ready", "in_flight", "dead", "behind")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    left: int
    name: str
    ready: int
    in_flight: int
    dead: int
    behind: int
    def __init__(self, left: _Optional[int] = ..., name: _Optional[str] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., dead: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class ScheduleSpec(_message.Message):
    __slots__ = ("topic", "cron", "timezone", "every_ms", "missed", "payload", "headers", "content_type", "sticky_key", "priority")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    STICKY_KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    cron: str
    timezone: str
    every_ms: int
    missed: str
    payload: bytes
    headers: _containers.ScalarMap[str, str]
    content_type: str
    sticky_key: str
    priority: int
    def __init__(self, topic: _Optional[str] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every_ms: _Optional[int] = ..., missed: _Optional[str] = ..., payload: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., content_type: _Optional[str] = ..., sticky_key: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class ScheduleReport(_message.Message):
    __slots__ = ("name", "topic", "cron", "timezone", "every_ms", "missed", "payload_bytes", "headers", "content_type", "sticky_key", "priority", "paused", "runs", "last_run", "last_message_id", "next_run", "from_code", "overridden", "created_at", "changed_at", "last_result")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    STICKY_KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LAST_RUN_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_RUN_FIELD_NUMBER: _ClassVar[int]
    FROM_CODE_FIELD_NUMBER: _ClassVar[int]
    OVERRIDDEN_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_RESULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    cron: str
    timezone: str
    every_ms: int
    missed: str
    payload_bytes: int
    headers: _containers.ScalarMap[str, str]
    content_type: str
    sticky_key: str
    priority: int
    paused: bool
    runs: int
    last_run: str
    last_message_id: str
    next_run: str
    from_code: bool
    overridden: bool
    created_at: str
    changed_at: str
    last_result: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every_ms: _Optional[int] = ..., missed: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., content_type: _Optional[str] = ..., sticky_key: _Optional[str] = ..., priority: _Optional[int] = ..., paused: _Optional[bool] = ..., runs: _Optional[int] = ..., last_run: _Optional[str] = ..., last_message_id: _Optional[str] = ..., next_run: _Optional[str] = ..., from_code: _Optional[bool] = ..., overridden: _Optional[bool] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ..., last_result: _Optional[str] = ...) -> None: ...

class SetScheduleRequest(_message.Message):
    __slots__ = ("name", "schedule", "from_code")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    FROM_CODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    schedule: ScheduleSpec
    from_code: bool
    def __init__(self, name: _Optional[str] = ..., schedule: _Optional[_Union[ScheduleSpec, _Mapping]] = ..., from_code: _Optional[bool] = ...) -> None: ...

class SetScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: ScheduleReport
    def __init__(self, schedule: _Optional[_Union[ScheduleReport, _Mapping]] = ...) -> None: ...

class ListSchedulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSchedulesResponse(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[ScheduleReport]
    def __init__(self, schedules: _Optional[_Iterable[_Union[ScheduleReport, _Mapping]]] = ...) -> None: ...

class PauseScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PauseScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: ScheduleReport
    def __init__(self, schedule: _Optional[_Union[ScheduleReport, _Mapping]] = ...) -> None: ...

class ResumeScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: ScheduleReport
    def __init__(self, schedule: _Optional[_Union[ScheduleReport, _Mapping]] = ...) -> None: ...

class RunScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RunScheduleResponse(_message.Message):
    __slots__ = ("message_id", "duplicate")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    duplicate: bool
    def __init__(self, message_id: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class SearchReport(_message.Message):
    __slots__ = ("search_id", "name", "query", "topics", "principal", "saved_at")
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    name: str
    query: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    principal: str
    saved_at: str
    def __init__(self, search_id: _Optional[str] = ..., name: _Optional[str] = ..., query: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., principal: _Optional[str] = ..., saved_at: _Optional[str] = ...) -> None: ...

class SaveSearchRequest(_message.Message):
    __slots__ = ("name", "query", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    query: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., query: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class SaveSearchResponse(_message.Message):
    __slots__ = ("search",)
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    search: SearchReport
    def __init__(self, search: _Optional[_Union[SearchReport, _Mapping]] = ...) -> None: ...

class ListSearchesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSearchesResponse(_message.Message):
    __slots__ = ("searches",)
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    searches: _containers.RepeatedCompositeFieldContainer[SearchReport]
    def __init__(self, searches: _Optional[_Iterable[_Union[SearchReport, _Mapping]]] = ...) -> None: ...

class DeleteSearchRequest(_message.Message):
    __slots__ = ("search_id",)
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    def __init__(self, search_id: _Optional[str] = ...) -> None: ...

class DeleteSearchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteScheduleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteOldEventsRequest(_message.Message):
    __slots__ = ("older_than_us",)
    OLDER_THAN_US_FIELD_NUMBER: _ClassVar[int]
    older_than_us: int
    def __init__(self, older_than_us: _Optional[int] = ...) -> None: ...

class DeleteOldEventsResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...
