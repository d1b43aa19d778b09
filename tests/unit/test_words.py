"""Names and phrases that were replaced by the terms of docs/glossary.md do not come back."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("postroom", "domain", "application", "projections", "adapters")
REPLACED_NAMES = {
    "Course": "MessageHistory",
    "DeadLetterOffice": "DeadLetterAdmin",
    "Ending": "DeliveryOutcome",
    "Fate": "Outcome",
    "InboxDesk": "InboxAdmin",
    "Letter": "DeadLetter",
    "Lookup": "CommandEnricher",
    "Moved": "CursorConflict",
    "OutboxDesk": "OutboxAdmin",
    "Standing": "MessageStatus",
    "alarms": "timers",
    "Death": "DeadLettering",
    "death": "dead_lettering",
    "deaths": "dead_letterings",
    "died": "dead_lettered",
    "doomed": "caused",
    "only_look": "can_redrive",
    "spared": "avoided",
    "beside": "background_task",
    "give_back": "reclaim_space",
    "hope": "optimistic",
    "leading": "leader_lock",
    "logtime": "ownership",
    "log_clock": "ownership",
    "luck": "jitter",
    "reprocess": "redrive",
    "told": "summary",
    "within_group": "from_batch",
    "words_of": "tokenize",
    # Participles are not names: say what the value is.
    "chosen": "a noun",
    "compared": "comparison",
    "covered": "cursors",
    "found": "a noun",
    "given": "a noun",
    "kept": "a noun",
    "known": "a noun",
    "wanted": "a noun",
}
REPLACED_PHRASES = (
    "a pause keeps its luck",
    "come for nothing",
    "for real",
    "holds nothing of the store",
    "if there are none",
    "if there is none",
    "losing it loses nothing",
    "put back",
    "the period 'week' is none",
    "told that it was not",
)


def sources() -> Iterator[Path]:
    for layer in PRODUCT:
        yield from (path for path in (ROOT / layer).rglob("*.py") if not path.name.endswith("_pb2.py"))


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def test_product_code_uses_no_name_that_was_replaced() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {name}; use {REPLACED_NAMES[name.strip('_')]}"
        for path in sources()
        for name, line in names(ast.parse(path.read_text("utf-8")))
        if name.strip("_") in REPLACED_NAMES
    ] == []


def test_no_page_and_no_product_code_uses_a_phrase_that_was_replaced() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *sources()]
    assert [
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in pages
        for phrase in REPLACED_PHRASES
        if phrase in path.read_text("utf-8").lower()
    ] == []
