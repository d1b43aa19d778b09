"""`postroom topic`: show and change the policy of a topic."""

from typing import Annotated

import msgspec
from typer import Argument

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import make_policy
from postroom.adapters.cli.values import format_duration, parse_pairs
from postroom.domain.errors import InvalidRequest

Topic = Annotated[str, Argument(help="Topic.")]


async def policy(
    session: Session,
    topic: Topic,
    changes: Annotated[
        list[str] | None,
        Argument(metavar="[NAME=VALUE]...", help="Fields to change, such as visibility=30s max_attempts=3."),
    ] = None,
) -> None:
    """Show the policy of a topic, or change it for its present and future messages."""
    if changes and topic in session.settings.topics:
        raise InvalidRequest(
            f'The policy of {topic} is set in {session.settings.file}; change [topics."{topic}"] there.'
        )
    pairs = parse_pairs(changes or (), "Change")
    if not pairs:
        with session.read(session.mailbox) as reader:
            current = reader.get_topic_policy(topic) or session.settings.policy
    else:
        async with session.use(create=True) as postroom:
            base = await postroom.get_topic_policy(topic) or session.settings.policy
            current = make_policy(base, pairs, f"The policy of {topic}")
            await postroom.set_topic_policy(topic, current)
    facts = msgspec.to_builtins(current)
    if session.out.as_json:
        session.out.json({"topic": topic, "policy": facts})
    else:
        session.out.facts((name.removesuffix("_ms"), _as_text(name, value)) for name, value in facts.items())


def _as_text(name: str, value: object) -> object:
    """Return the value of a field as it may be set."""
    if isinstance(value, bool):
        return str(value).lower()
    return format_duration(value) if name.endswith("_ms") and isinstance(value, int) else value
