-- RFC-037's table `mailbox`, as a view of the active version. Envelopes are in the log only.

DROP VIEW IF EXISTS mailbox;

CREATE VIEW mailbox AS
SELECT id, {message_id}, timestamp, topic, content_type, schema_url, schema_version, encryption, correlation_id, principal,
       namespace, trace_id, span_id, custom_headers, NULL AS envelope_blob, created_at, NULL AS body
FROM mailbox_v{version};
