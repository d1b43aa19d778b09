-- RFC-037's table `mailbox`, as a view of the active version. `body` is the envelope, which contains the payload.

CREATE OR REPLACE VIEW postroom.mailbox AS
SELECT id, message_id, timestamp, topic, content_type, schema_url, schema_version, encryption, correlation_id, principal,
       namespace, trace_id, span_id, custom_headers, envelope_blob, created_at, envelope_blob AS body
FROM postroom.mailbox_v{version};
