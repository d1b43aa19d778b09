"""Snippets of shell and Python code, for copying and pasting, that read a message or send it again.

They contain no token, but read it from the environment variable `POSTROOM_TOKEN`.
"""

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from postroom.adapters.console.page import Page
from postroom.application.messages import NewMessage
from postroom.application.text import printable
from postroom.domain.envelope.headers import BINARY_PREFIX

MAX_PAYLOAD_BYTES = 32 << 10
"""Largest payload that a snippet contains."""
MAX_CHARS = 100_000
"""Longest snippet, below the 128 KiB to which Linux limits an argument of a command."""
BELOW_PATH = "Clients expect the mailbox at the root of a host, but a proxy serves it below a path."
NOT_SERVED = "This server has no HTTP interface; serve the mailbox with postroom serve."
_CURL = "curl -sS --fail-with-body --globoff --path-as-is"
_AUTHORIZATION = '-H "Authorization: Bearer $POSTROOM_TOKEN"'
_DEFAULTS = NewMessage(topic="", payload=b"")
_OPTIONS = (
    ("sticky_key", "--key"),
    ("content_type", "--content-type"),
    ("correlation_id", "--correlation-id"),
    ("causality_parent", "--causality-parent"),
    ("principal", "--principal"),
    ("schema_url", "--schema-url"),
    ("schema_version", "--schema-version"),
)
_TOO_LONG: dict[str, Any] = {
    "text": None,
    "reason": "The headers and payload are too long for a snippet; download the payload, and write the call.",
}
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


class Endpoint(NamedTuple):
    """The HTTP interface that snippets call.

    Arguments:
        url: base URL without a trailing slash; empty if the interface is not served.
        mailbox: name of the mailbox.
        needs_token: whether calls need a token.
    """

    url: str
    mailbox: str
    needs_token: bool = True

    @property
    def obstacle(self) -> str:
        """Return the reason why clients can't connect, as a sentence; empty if they can."""
        if not self.url:
            return NOT_SERVED
        return BELOW_PATH if urlsplit(self.url).path else ""


def endpoint_of(page: Page) -> Endpoint:
    """Return the HTTP interface that code on a page calls."""
    if not page.data.serves_calls:
        return Endpoint("", page.mailbox.name)
    host = page.request.headers.get("host", "")
    prefix = page.base.removesuffix(page.request.scope["root_path"])
    # A proxy in front uses TLS, and tokens must not be sent in clear text.
    scheme = "https" if page.console.is_secure else "http"
    return Endpoint(f"{scheme}://{host}{prefix}", page.mailbox.name, not page.service.is_dev)


class Snippet(NamedTuple):
    """Code that calls a mailbox.

    Arguments:
        name: language or tool.
        text: the code; None if it can't be generated.
        reason: why it can't, as a sentence.
    """

    name: str
    text: str | None
    reason: str = ""


def read_snippets(endpoint: Endpoint, id_: str) -> list[Snippet]:
    """Return snippets that read a message by its id."""
    url = shell_quote(f"{endpoint.url}/v1/messages/{quote_id(id_)}")
    curl = " ".join([_CURL, *_headers(endpoint), url]) if endpoint.url else None
    python = _python(endpoint, f"print(mailbox.get_message({python_text(id_)}))", "connect")
    mailbox = f"--mailbox={shell_quote(endpoint.mailbox)}"
    show = None if "\0" in id_ else f"postroom {mailbox} show -- {shell_quote(id_)}"
    return [
        Snippet("curl", curl, NOT_SERVED),
        Snippet(
            "Command line, on the host of the store", show, "The id has a NUL, which no argument can contain."
        ),
        Snippet("Python", None if endpoint.obstacle else python, endpoint.obstacle),
    ]


def send_snippets(endpoint: Endpoint, message: NewMessage) -> list[Snippet]:
    """Return snippets that send a message."""
    if len(message.payload) > MAX_PAYLOAD_BYTES:
        reason = f"The payload has more than {MAX_PAYLOAD_BYTES:,} bytes; download it, and send the file."
        return [Snippet(name, None, reason) for name in ("curl", "Command line", "Python")]
    command, reason = _send_command(endpoint, message)
    snippets = [
        Snippet("curl", _send_curl(endpoint, message) if endpoint.url else None, NOT_SERVED),
        Snippet("Command line", command, reason),
        Snippet("Python", None if endpoint.obstacle else _send_python(endpoint, message), endpoint.obstacle),
    ]
    return [each if len(each.text or "") <= MAX_CHARS else each._replace(**_TOO_LONG) for each in snippets]


def quote_id(id_: str) -> str:
    """Return a message id escaped as one path segment of a URL."""
    return quote(id_, safe="").replace(".", "%2E") if id_.strip(".") == "" else quote(id_, safe="")


def shell_quote(text: str) -> str:
    """Quote text as one word of bash, zsh or ksh, with invisible characters escaped.

    Text without control and bidirectional characters is quoted for any POSIX shell.
    """
    if printable(text, multiline=False) == text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNPRINTABLE.sub(lambda match: _octal(match[0]), escaped)}'"


def python_text(text: str) -> str:
    """Return a Python string literal in ASCII."""
    return ascii(text)


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def _headers(endpoint: Endpoint) -> list[str]:
    return [_AUTHORIZATION] if endpoint.needs_token else []


def _fields(message: NewMessage) -> dict[str, Any]:
    """Return the fields of a message that are set, without topic, payload and attributes."""
    values = {name: getattr(message, name) for name in NewMessage.__struct_fields__}
    return {
        name: value
        for name, value in values.items()
        if name not in ("topic", "payload", "attrs") and value != getattr(_DEFAULTS, name)
    }


def _send_curl(endpoint: Endpoint, message: NewMessage) -> str:
    body: dict[str, Any] = {"topic": message.topic, "payload_b64": b64encode(message.payload).decode()}
    texts, binaries = _split(message.attrs)
    if texts:
        body["attrs"] = texts
    if binaries:
        body["attrs_b64"] = {name: b64encode(value).decode() for name, value in binaries.items()}
    json_text = json.dumps(body | _fields(message))  # in ASCII
    media = "-H 'Content-Type: application/json'"
    url = shell_quote(f"{endpoint.url}/v1/send")
    return " ".join([_CURL, *_headers(endpoint), media, "--data-raw", shell_quote(json_text), url])


def _send_command(endpoint: Endpoint, message: NewMessage) -> tuple[str | None, str]:
    if endpoint.url and endpoint.obstacle:
        return None, endpoint.obstacle
    texts, binaries = _split(message.attrs)
    if any(each.startswith(BINARY_PREFIX) for each in texts.values()) or binaries:
        return None, "The message has a binary header, which the command line can't send."
    if any("=" in name for name in texts):
        return None, "The name of a header has an equals sign, which the command line can't send."
    words = [f"--attr={shell_quote(f'{name}={value}')}" for name, value in texts.items()]
    fields = _fields(message)
    words += [f"{option}={shell_quote(fields[name])}" for name, option in _OPTIONS if name in fields]
    if "priority" in fields:
        words.append(f"--priority={fields['priority']}")
    if "deliver_after_ms" in fields:
        words.append(f"--delay={fields['deliver_after_ms']}ms")
    if "ttl_seconds" in fields:
        words.append(f"--ttl={fields['ttl_seconds']}s")
    payload, pipe = "-", f"printf %s {shell_quote(b64encode(message.payload).decode())} | base64 -d | "
    try:
        text = message.payload.decode()
        if "\0" not in text and text != "-":
            payload, pipe = shell_quote(text), ""
    except UnicodeDecodeError:
        pass  # it is piped
    where = (
        f"--store={shell_quote(endpoint.url)}"
        if endpoint.url
        else f"--mailbox={shell_quote(endpoint.mailbox)}"
    )
    call = f"postroom {where} send"
    command = f"{pipe}{' '.join([call, *words, '--', shell_quote(message.topic), payload])}"
    if any("\0" in each for each in (*texts, *texts.values(), *map(str, fields.values()))):
        return None, "A header has a NUL, which no argument can contain."
    return command, ""


def _send_python(endpoint: Endpoint, message: NewMessage) -> str:
    attrs = f", attrs={dict(message.attrs)!a}" if message.attrs else ""
    fields = "".join(f", {name}={value!a}" for name, value in _fields(message).items())
    new = f"NewMessage(topic={python_text(message.topic)}, payload={message.payload!r}{attrs}{fields})"
    return _python(endpoint, f"print(mailbox.send_message({new}).message_id)", "NewMessage, connect")


def _python(endpoint: Endpoint, line: str, names: str) -> str:
    token = ', token=os.environ["POSTROOM_TOKEN"]' if endpoint.needs_token else ""
    lines = ["import os", "", f"from postroom import {names}", ""]
    return "\n".join(
        [
            *lines[0 if token else 2 :],
            f"with connect({python_text(endpoint.url)}{token}) as mailbox:",
            f"    {line}",
            "",
        ]
    )


def _split(attrs: Mapping[str, str | bytes]) -> tuple[dict[str, str], dict[str, bytes]]:
    texts = {name: value for name, value in attrs.items() if isinstance(value, str)}
    return texts, {name: value for name, value in attrs.items() if isinstance(value, bytes)}
