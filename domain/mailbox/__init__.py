"""The Mailbox aggregate: queues derived from a single-writer log."""
