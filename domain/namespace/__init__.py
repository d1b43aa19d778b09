"""Namespaces of several mailboxes: which mailbox has a key, and in which order mailboxes are drained."""
