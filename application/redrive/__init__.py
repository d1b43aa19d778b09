"""Redrive jobs of a mailbox, in the process that owns it."""
