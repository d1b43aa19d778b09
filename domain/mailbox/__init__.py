"""The Mailbox aggregate: a single-writer log, and the queues that are a fold of it."""
