"""Rates of topics, from the metrics of their mailbox."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.console import samples as samples_module
from postroom.adapters.console.samples import EVENTS, Samples
from postroom.application.metrics import Metric
from postroom.domain.policy import TopicPolicy
from tests.support.messages import message
from tests.support.waiting import until


async def test_topics_have_rates_of_what_happened_to_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "EVERY_SECONDS", 0.0)
    async with open_mailbox("memory:") as mailbox:
        await mailbox.set_topic_policy("bills", TopicPolicy(max_attempts=1))
        await mailbox.send_batch([message(topic="orders")] * 2)
        measured: list[Sequence[Metric]] = [await mailbox.measure()]
        stopping = asyncio.Event()
        await mailbox.send_message(message(topic="orders"))
        await mailbox.send_batch([message(topic="orders"), message(topic="bills"), message(topic="bills")])
        first, *others = await mailbox.receive_messages("orders", max_messages=4)
        await first.nack(reason="bad")
        await mailbox.ack_messages([each.receipt for each in others[:2]])
        await others[2].ack()
        (last, _) = await mailbox.receive_messages("bills", max_messages=2)
        await last.nack(reason="bad")  # its last attempt
        measured.append(await mailbox.measure())

        async def measure() -> Sequence[Metric]:
            if len(measured) == 1:
                stopping.set()
            return measured.pop(0)

        samples = Samples(mailbox, measure)
        assert samples.topic_rate("sent", "orders") is None
        await samples.run(stopping)
        await until(lambda: not measured)
        rates: Any = {
            topic: [samples.topic_rate(event, topic) for event in EVENTS]
            for topic in ("orders", "bills", "none")
        }
    unit = rates["bills"][3]  # of one message
    assert unit > 0
    counts = {topic: [round(each / unit) for each in values] for topic, values in rates.items()}
    assert counts == {"orders": [2, 4, 3, 1], "bills": [2, 2, 0, 1], "none": [0, 0, 0, 0]}
