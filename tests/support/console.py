"""Sessions in documentation: ```console blocks whose commands run and whose output is compared.

A line that begins with `$ ` is a command; the lines up to the next one are its output, stdout and stderr
together. `...` matches any text. Message ids and receipts stand for those of the run, also in later commands;
times, ages, digests, decimal fractions and runs of blanks match any others.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMES = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # message ids
    r"|\br\.[A-Za-z0-9_-]{20,}"  # receipts
)
_VARIABLE = (
    (re.compile(r"\.\.\."), r"[\s\S]*?"),
    (re.compile(r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d+)?)?Z)?"), r"\d{4}-\d\d-\d\d(?:T[\d:.]+Z)?"),
    (re.compile(r"\b\d{13}\b"), r"\d{13}"),  # ms since 1970
    (re.compile(r"\b[0-9a-f]{32,}\b"), r"[0-9a-f]{32,}"),
    (re.compile(r"\b\d+(s|m|h|d)\b"), r"\d+[smhd]"),
    (re.compile(r"\b\d+\.\d+\b"), r"\d+\.\d+"),
    (re.compile(r"─+"), r"─+"),
    (re.compile(r"  +"), r" +"),
)
_FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_KINDS = ((_NAMES, f"({_NAMES.pattern})"), *_VARIABLE)


@dataclass(frozen=True)
class Step:
    """A command and the output that the page shows."""

    command: str
    output: str


def read_steps(page: str) -> Iterator[Step]:
    """Yield the commands of a page's console blocks in order."""
    for block in _BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Step(command, output.strip("\n"))


def read_files(page: str) -> dict[str, str]:
    """Return the files that a page shows, each with its name in its first line."""
    return dict(_FILE.findall(page))


class Session:
    """Run the steps of a page in order, and compare what they print.

    Arguments:
        run: runs a shell command and returns what it printed.
    """

    def __init__(self, run: Callable[[str], str]) -> None:
        self._run = run
        self._actual: dict[str, str] = {}
        """Ids and receipts of this run, by those that the page shows."""

    def __call__(self, step: Step) -> None:
        """Run a step; raise AssertionError where its output is not what the page shows."""
        printed = self._run(self._translate(step.command)).strip("\n")
        names = _NAMES.findall(step.output)
        match = re.fullmatch(_pattern(step.output), "\n".join(map(str.rstrip, printed.splitlines())))
        assert match, f"$ {step.command}\nThe page shows:\n{step.output}\nThe command printed:\n{printed}"
        for name, actual in zip(names, match.groups(), strict=True):
            assert self._actual.setdefault(name, actual) == actual, f"{step.command}: {name} is another now"

    def _translate(self, command: str) -> str:
        return _NAMES.sub(lambda name: self._actual.get(name[0], name[0]), command)


def _pattern(output: str) -> str:
    text = "\n".join(map(str.rstrip, output.splitlines()))
    position, pattern = 0, ""
    while position < len(text):
        for kind, replacement in _KINDS:
            if match := kind.match(text, position):
                pattern, position = pattern + replacement, match.end()
                break
        else:
            pattern, position = pattern + re.escape(text[position]), position + 1
    return pattern
