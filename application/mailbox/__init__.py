"""Mailboxes: command handlers, the engine, and retention."""
