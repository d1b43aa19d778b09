"""What is fuzzed: functions that take any bytes and raise an error only for a defect."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

Check = Callable[[bytes], None]
CORPUS = Path(__file__).with_name("corpus")
TARGETS = (
    "envelopes",
    "grpc_requests",
    "http_requests",
    "json_lines",
    "lease_events",
    "local_frames",
    "manifests",
    "records",
    "sqs_requests",
    "tokens",
)
"""Names of the targets, which are modules of this package."""

MAX_BYTES = 8_192
"""Size above which inputs are not made longer; bombs are larger."""
_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]


class Target:
    """A parser with what it is fed.

    The module of a target has `SEEDS`, valid inputs and ones that were found; `BOMBS`, inputs whose length
    or nesting must not cost time or memory out of proportion; and `opened()`, a context with the check.
    """

    def __init__(self, name: str) -> None:
        module: Any = import_module(f"tests.fuzz.{name}")
        self.name = name
        self.bombs: Sequence[bytes] = module.BOMBS
        self._module = module

    @property
    def seeds(self) -> list[bytes]:
        """Return the seeds of the module, and the files of the corpus in the order of their names."""
        files = sorted((CORPUS / self.name).glob("*")) if (CORPUS / self.name).is_dir() else []
        return [*self._module.SEEDS, *(file.read_bytes() for file in files)]

    @contextmanager
    def opened(self) -> Iterator[Check]:
        """Yield the check, which may use servers that end with the context."""
        with self._module.opened() as check:
            yield check


def mutate(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return an input that was made from a seed or from two."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.randrange(1, 6)):
        at = random.randrange(len(data) + 1)
        match random.randrange(7):
            case 0:
                data[at : at + 1] = random.randbytes(1)
            case 1:
                del data[at : at + random.randrange(1, 9)]
            case 2:
                data[at:at] = random.randbytes(random.randrange(1, 9))
            case 3:
                number = random.choice(_NUMBERS)
                size = random.choice([1, 2, 4, 8])
                data[at : at + size] = (number & ((1 << (8 * size)) - 1)).to_bytes(size, "big")
            case 4:
                other = random.choice(seeds)
                start = random.randrange(len(other) + 1)
                data[at:at] = other[start : start + random.randrange(1, 65)]
            case 5:
                part = data[at : at + random.randrange(1, 65)]
                data[at:at] = part * random.randrange(1, 5)
            case _:
                data[at : at + 1] = random.choice(
                    [b'"', b"[", b"{", b"\\u0000", b"-1", b"1e999", b"null", b"\n"]
                )
    return bytes(data[:MAX_BYTES])
