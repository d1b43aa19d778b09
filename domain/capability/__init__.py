"""Capabilities: bearer tokens that say who may do what; their holders can narrow them (svc-mailbox I-8)."""
