"""Comparison of a NATS server with definitions of streams and consumers, and their application (SDS-047).

This module can be imported without the client of NATS.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.nats.definitions import (
    ConsumerDefinition,
    Definition,
    Difference,
    StreamDefinition,
    compare,
    with_defaults,
)
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.nats.streams import JetStreamStreams


class Plan(msgspec.Struct, frozen=True):
    """Definitions from which a server differs, in the order of application."""

    steps: Sequence[tuple[Definition, Sequence[Difference]]]

    @property
    def differences(self) -> Sequence[Difference]:
        """Return all differences, streams first."""
        return [difference for _, differences in self.steps for difference in differences]


async def make_plan(server: "JetStreamStreams", definitions: Sequence[Definition]) -> Plan:
    """Compare a server with definitions, without changing it.

    Raises: InvalidRequest for a consumer whose stream doesn't exist and is not defined.
    """
    streams = [each for each in definitions if isinstance(each, StreamDefinition)]
    consumers = [each for each in definitions if isinstance(each, ConsumerDefinition)]
    steps: list[tuple[Definition, Sequence[Difference]]] = [
        (stream, compare(stream, await server.find_stream(stream.name))) for stream in streams
    ]
    defined = {stream.name for stream in streams}
    for consumer in consumers:
        if consumer.stream not in defined and await server.find_stream(consumer.stream) is None:
            raise InvalidRequest(
                f"Consumer {consumer.durable} reads stream {consumer.stream}, which neither exists nor is "
                f"defined; add [streams.{consumer.stream}] or correct its name."
            )
        steps.append(
            (consumer, compare(consumer, await server.find_consumer(consumer.stream, consumer.durable)))
        )
    return Plan([(definition, differences) for definition, differences in steps if differences])


async def apply_plan(server: "JetStreamStreams", plan: Plan) -> None:
    """Create missing streams and consumers and update different ones, streams first.

    Raises: InvalidRequest if NATS does not support one of the changes, in which case nothing is changed, or
        if the server refuses a step; earlier steps remain applied then, and it is safe to apply again.
    """
    refusals = [f"{each.kind} {each.name}: {each.refusal}" for each in plan.differences if each.refusal]
    if refusals:
        raise InvalidRequest(f"Nothing was changed. {'. '.join(refusals)}.")
    for definition, differences in plan.steps:
        is_new = differences[0].action == "create"
        target = with_defaults(definition) if is_new else definition
        if isinstance(target, StreamDefinition):
            await (server.create_stream(target) if is_new else server.update_stream(target))
        else:
            await (server.create_consumer(target) if is_new else server.update_consumer(target))
