"""Wiring of amnesia mode: what keeps a process off every disk."""

from postroom.adapters.system.memory import protect_memory

__all__ = ["protect_memory"]
