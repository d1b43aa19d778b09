"""Wiring of amnesia mode: protection of a process's memory from being written to a disk."""

from postroom.adapters.system.memory import protect_memory

__all__ = ["protect_memory"]
