"""Bringing streams and consumers to what their definitions say: look first, then change."""

from collections.abc import Sequence

import msgspec

from postroom.application.ports.streams import Streams
from postroom.domain.errors import InvalidRequest
from postroom.domain.streams import (
    ConsumerDefinition,
    Definition,
    Difference,
    StreamDefinition,
    compare,
    completed,
)


class Plan(msgspec.Struct, frozen=True):
    """Hold how definitions differ from what is there, and what to do about it, in this order."""

    steps: Sequence[tuple[Definition, Sequence[Difference]]]

    @property
    def differences(self) -> Sequence[Difference]:
        """Return all differences, streams first."""
        return [difference for _, differences in self.steps for difference in differences]


async def plan(broker: Streams, definitions: Sequence[Definition]) -> Plan:
    """Return how what the broker has differs from its definitions; change nothing.

    Raises: InvalidRequest for a consumer whose stream neither is there nor is defined.
    """
    streams = [each for each in definitions if isinstance(each, StreamDefinition)]
    consumers = [each for each in definitions if isinstance(each, ConsumerDefinition)]
    steps: list[tuple[Definition, Sequence[Difference]]] = [
        (stream, compare(stream, await broker.find_stream(stream.name))) for stream in streams
    ]
    defined = {stream.name for stream in streams}
    for consumer in consumers:
        if consumer.stream not in defined and await broker.find_stream(consumer.stream) is None:
            raise InvalidRequest(
                f"Consumer {consumer.durable} reads stream {consumer.stream}, which neither is there nor is "
                f"defined; add [streams.{consumer.stream}] or correct its name."
            )
        steps.append(
            (consumer, compare(consumer, await broker.find_consumer(consumer.stream, consumer.durable)))
        )
    return Plan([(definition, differences) for definition, differences in steps if differences])


async def apply(broker: Streams, plan: Plan) -> None:
    """Make what is missing and change what differs, streams before consumers.

    Raises: InvalidRequest before anything is changed where the plan holds what can't be, or when the broker
    refuses a step; those before it are done then, and it is safe to plan and apply again.
    """
    refused = [f"{each.kind} {each.name}: {each.refused}" for each in plan.differences if each.refused]
    if refused:
        raise InvalidRequest(f"Nothing was changed. {'. '.join(refused)}.")
    for definition, differences in plan.steps:
        is_new = differences[0].action == "create"
        wanted = completed(definition) if is_new else definition
        if isinstance(wanted, StreamDefinition):
            await (broker.create_stream(wanted) if is_new else broker.update_stream(wanted))
        else:
            await (broker.create_consumer(wanted) if is_new else broker.update_consumer(wanted))
