import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.machine import (
    FairKeysMachine,
    KeyBatchesMachine,
    MailboxMachine,
    OrderedKeysMachine,
    SharedLimitsMachine,
    UniqueKeysMachine,
    WeightedKeysMachine,
)
from tests.simulation.subscriptions import SubscriptionsMachine


@pytest.mark.timeout(3600)  # half a minute of CPU, but far longer on a machine that is shared with many
def test_whatever_happens_the_mailbox_does_what_the_model_says() -> None:
    chosen = settings()
    run_state_machine_as_test(MailboxMachine, settings=settings(chosen, max_examples=2 * chosen.max_examples))


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_messages_of_an_ordered_key_are_delivered_in_their_order() -> None:
    run_state_machine_as_test(OrderedKeysMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_messages_of_a_batch_are_delivered_and_acked_in_their_order() -> None:
    run_state_machine_as_test(KeyBatchesMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_a_unique_key_has_one_unsettled_message() -> None:
    run_state_machine_as_test(UniqueKeysMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_keys_take_turns_and_no_limit_is_exceeded() -> None:
    run_state_machine_as_test(FairKeysMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_a_key_has_as_many_messages_in_its_turn_as_its_weight() -> None:
    run_state_machine_as_test(WeightedKeysMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_topics_that_share_their_limits_stay_within_them() -> None:
    run_state_machine_as_test(SharedLimitsMachine, settings=settings())


@pytest.mark.timeout(3600)  # as above
def test_whatever_happens_no_subscription_misses_or_doubles_a_message() -> None:
    run_state_machine_as_test(SubscriptionsMachine, settings=settings())
