"""Sessions in documentation: blocks whose commands run and whose output is compared.

In ```console blocks, a line that begins with `$ ` is a command; the lines up to the next one are its output,
stdout and stderr together. A command that ends in ` &` runs until the end of the page. Lines of ```sh blocks
are commands whose output is not shown; they succeed, or run until the end of the page.

`...` matches any text. Message ids and receipts stand for those of the run, also in later commands;
times, ages, digests, decimal fractions and runs of blanks match any others.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_BLOCK = re.compile(r"^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s+)# .*")
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
    """A command and the output that the page shows; None if it shows none."""

    command: str
    output: str | None


def read_steps(page: str, languages: Sequence[str] = ("console",)) -> Iterator[Step]:
    """Yield the commands of a page's blocks in order.

    Arguments:
        languages: `console`, `sh`, or both.
    """
    for language, block in _BLOCK.findall(page):
        if language not in languages:
            continue
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                if command := _COMMENT.sub("", line).strip():
                    yield Step(command, None)
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, output = _split(part)
            yield Step(command, output.strip("\n"))


def _split(part: str) -> tuple[str, str]:
    """Return a command, which may be continued over several lines, and its output."""
    command, _, output = part.partition("\n")
    while command.endswith("\\"):
        line, _, output = output.partition("\n")
        command = f"{command[:-1]} {line.strip()}"
    return command, output


def read_files(page: str) -> dict[str, str]:
    """Return the files that a page shows, each with its name in its first line."""
    return dict(_FILE.findall(page))


class Session:
    """Run the steps of a page in order, and compare what they print.

    Arguments:
        run: runs a shell command and returns what it printed.
        start: runs a shell command until it ends, or is ready and has printed what its second argument
            expects, and then leaves it running; returns what it printed so far. It fails if the command does.
    """

    def __init__(
        self,
        run: Callable[[str], str],
        start: Callable[[str, Callable[[str], bool]], str] | None = None,
    ) -> None:
        self._run = run
        self._start = start
        self._actual: dict[str, str] = {}
        """Ids and receipts of this run, by those that the page shows."""

    def __call__(self, step: Step) -> None:
        """Run a step; raise AssertionError where its output is not what the page shows."""
        command = self._translate(step.command)
        if self._start is not None and step.output is None:
            self._start(command, lambda printed: True)
            return
        shown = step.output or ""
        pattern = re.compile(_pattern(shown))
        if self._start is not None and command.endswith(" &"):
            printed = self._start(
                command.removesuffix(" &"), lambda text: bool(pattern.fullmatch(_plain(text)))
            )
        else:
            printed = self._run(command)
        match = pattern.fullmatch(_plain(printed))
        assert match, f"$ {step.command}\nThe page shows:\n{shown}\nThe command printed:\n{printed}"
        for name, actual in zip(_NAMES.findall(shown), match.groups(), strict=True):
            assert self._actual.setdefault(name, actual) == actual, f"{step.command}: {name} is another now"

    def _translate(self, command: str) -> str:
        return _NAMES.sub(lambda name: self._actual.get(name[0], name[0]), command)


def _plain(text: str) -> str:
    """Return text without blanks at the ends of lines, and without empty lines at its ends."""
    return "\n".join(map(str.rstrip, text.strip("\n").splitlines()))


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
