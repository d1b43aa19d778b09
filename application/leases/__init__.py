"""Leases of mailboxes and registrations of proxies, in the log of a lease store (RFC-049, ADR 0058)."""
