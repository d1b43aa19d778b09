"""Steps of generated histories of a mailbox."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operate:
    how: str
    topic: str


@dataclass(frozen=True)
class Wait:
    ms: int
