"""Outbox, relays, broker, worker and inbox together: crashes lose nothing and double nothing."""

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.messaging.machine import MessagingMachine
from tests.simulation.messaging.world import Servers


def test_each_committed_event_takes_effect_once_whatever_crashes_in_between(servers: Servers) -> None:
    MessagingMachine.servers = servers
    run_state_machine_as_test(
        MessagingMachine,
        settings=settings(
            max_examples=max(8, settings().max_examples // 8),
            stateful_step_count=20,
            phases=[Phase.generate],  # to shrink an example of real servers takes many minutes
        ),
    )
