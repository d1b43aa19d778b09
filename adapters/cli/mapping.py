"""Options that map JSON documents to messages, for `postroom import` and `postroom ingest`."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.values import WrongUsage, parse_pairs

if TYPE_CHECKING:
    from postroom.application.ingest.file_import import RecordMapping

Headers = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=PATH",
        help="Header from a field, such as principal=sender.login; may be repeated. principal, "
        "correlation_id, trace_id, span_id and content_type are standard, others are custom headers.",
    ),
]
Key = Annotated[str | None, Option(metavar="PATH", help="Field of the sticky key.")]
Time = Annotated[
    str | None,
    Option(
        "--time", metavar="PATH", help="Field of the publish time: RFC 3339, or s, ms, µs, ns since 1970."
    ),
]
Id = Annotated[
    str | None,
    Option(
        "--id",
        metavar="PATH",
        help="Field of the message id; default: the publisher's, or derived from place and content.",
    ),
]


def record_mapping(
    topic: str | None, headers: list[str], key: str | None, time: str | None, id_: str | None
) -> "RecordMapping | None":
    """Return the mapping of the options, or None without a topic, which all others require."""
    from postroom.application.ingest.file_import import RecordMapping, TopicTemplate, parse_path

    if topic is None:
        if headers or key or time or id_:
            raise WrongUsage("--header, --key, --time and --id require --topic.")
        return None
    return RecordMapping(
        topic=TopicTemplate(topic),
        headers={name: parse_path(path) for name, path in parse_pairs(headers, "--header").items()},
        key=parse_path(key) if key else None,
        time=parse_path(time) if time else None,
        id=parse_path(id_) if id_ else None,
    )
