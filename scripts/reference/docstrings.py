"""Docstrings as Markdown: text, arguments with their meanings, errors and code."""

import inspect
import re
import textwrap
from typing import Any

import postroom
from scripts.operations import read_docstring
from scripts.reference.tables import link_adrs

ADRS = "../../adr"
TERMS = {
    "at": "position in the log, or a time; None is now.",
    "changes": "changes of the settings.",
    "dead": "whether to remove its dead letters.",
    "epoch": "number of the owner that this process was.",
    "error": "what the handler raised.",
    "events": "events to record.",
    "filter_": "what to find.",
    "handler": "instead of the URL of the settings.",
    "id_": "id of the message.",
    "limit": "maximum number of results.",
    "mailbox": "name of the mailbox, such as `main@local`.",
    "messages": "new messages.",
    "message_id": "id of the message.",
    "name": "its name.",
    "newer": "number of the owner that took over.",
    "parameters": "values by name, as of the command line.",
    "policy": "policy of a topic.",
    "owner": "text that others read who wait for the mailbox.",
    "position": "position in the log.",
    "ready": "whether to remove its waiting messages.",
    "reason": "why, as text.",
    "request": "event with its type, payload and headers.",
    "receipts": "receipts of deliveries.",
    "replace": "whether what the changes leave out is removed.",
    "retry_after_ms": "time after which to retry, in ms.",
    "shard": "number of the shard, from 0.",
    "simulation": "policies to compare; it collects the outcomes.",
    "store": "path of a SQLite file, or `postgresql://` URL.",
    "table": "name of the field.",
    "tables": "names of the tables.",
    "topic": "name of the topic.",
    "traceback": "of the error.",
    "visibility_ms": "time from now on, in ms.",
}
"""Meanings of names that are the same everywhere, where a docstring does not say more."""


def term(parameter: Any) -> str:
    """Return what a name means everywhere."""
    if parameter.name == "message":
        return "the text." if str(parameter.annotation) == "str" else "the message."
    return TERMS.get(parameter.name, "")


def docstring_of(target: Any) -> str:
    """Return the docstring of what griffe found; empty without one."""
    return with_plain_head(inspect.cleandoc(target.docstring.value)) if target.docstring is not None else ""


def with_plain_head(docstring: str) -> str:
    """Return a docstring whose arguments begin without a remark, such as `Arguments, in ms:`."""
    return re.sub(r"\nArguments(?:, [^:\n]*)?:\n", "\nArguments:\n", docstring)


def meanings_of(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    return read_docstring(docstring)[1]


def text_of(docstring: str) -> str:
    """Return the text of a docstring without its arguments, as Markdown."""
    before, _, after = docstring.partition("\nArguments:\n")
    rest = after.partition("\n\n")[2]
    return prose("\n\n".join(filter(None, (_paragraphs(before), _paragraphs(rest)))))


def _paragraphs(text: str) -> str:
    """Return paragraphs: indented ones as code, and the lists of `Raises:` and `Returns:` as such."""
    text = re.sub(r"\n(?=(?:Raises|Returns)\b[^\n]*:)", "\n\n", text.strip("\n"))
    shown = []
    for each in re.split(r"\n\n+(?=\S)", text):
        first, _, listed = each.partition("\n")
        if re.fullmatch(r"(?:Raises|Returns):", first):
            items = re.sub(r"\n(?=    \S)", "\n\n", "\n" + listed).strip().split("\n\n")
            shown.append(f"{first}\n\n" + "\n".join(f"- {' '.join(item.split())}" for item in items))
            continue
        prose, *code_blocks = re.split(r"\n\n(?=    )", each, maxsplit=1)
        shown.append(re.sub(r"\n +", "\n", prose))
        shown += [f"```python\n{textwrap.dedent(block)}\n```" for block in code_blocks]
    return "\n\n".join(shown)


def prose(text: str) -> str:
    """Return the text of a docstring: without clauses of the specification, with links to ADRs."""
    text = re.sub(r" ?\((?:svc-mailbox|SDS-047|RFC-0\d\d)[^)]*\)", "", text)
    return link_adrs(re.sub(r"(?m)^(Raises|Returns):", r"**\1**:", text), ADRS)


def referred(docstring: str) -> str:
    """Return the docstring of the method to which one refers, as in: see `ReceivedMessage.ack`."""
    for owner, name in re.findall(r"see `(\w+)\.(\w+)`", docstring):
        method = getattr(getattr(postroom, owner, None), name, None)
        if method is not None:
            return "\n\n" + with_plain_head(inspect.getdoc(method) or "")
    return ""
