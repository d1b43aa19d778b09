"""Leases of mailboxes, the partitions of proxies, and routes (RFC-049): pure decisions, states and folds."""
