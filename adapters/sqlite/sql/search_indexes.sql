-- Topics, collected after the load.

INSERT INTO topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM mailbox_v{version} GROUP BY topic;
