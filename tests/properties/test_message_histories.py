"""The history of every message agrees with what the mailbox knows of it, whatever happened."""

from hypothesis import given

from postroom.adapters.compose.queries import Reader
from postroom.application.mailbox.stored_snapshots import fold
from postroom.domain.message import DEAD, IN_FLIGHT, MessageReceived, MessageSent
from postroom.domain.names import mailbox_stream, message_id
from tests.properties.pasts import Step, histories, live, without_retention
from tests.properties.tracing import message_histories
from tests.support.stores import MAILBOX, memory_place


@given(histories)
def test_a_course_ends_where_the_message_stands(taken: list[Step]) -> None:
    past = live(memory_place(), taken)
    mailbox = fold(past.log)
    for history in message_histories(past.log):
        message = mailbox.messages.get(history.stream)
        assert history.is_settled == (message is None)
        if message is None:
            continue
        latest = history.rounds[-1]
        in_flight = history.in_flight
        assert (in_flight is not None) == (message.status == IN_FLIGHT)
        assert (latest.dead_lettering is not None) == (message.status == DEAD)
        released = [each for each in latest.deliveries if each.outcome and each.outcome.kind == "released"]
        assert message.attempt == len(latest.deliveries) - len(released)
        assert message.redriven == len(history.rounds) - 1
        if in_flight is not None:
            assert (message.due, message.hidden) == (in_flight.deadline, in_flight.hidden)


@given(histories.map(without_retention))
def test_an_account_leaves_nothing_out(taken: list[Step]) -> None:
    past = live(memory_place(), taken)
    own = mailbox_stream(MAILBOX)
    events = [record.event for record in past.log.read() if record.stream != own]
    reader = Reader(past.log, past.place.clock)
    for id_ in {message_id(e.stream, e.headers.message_id) for e in events if isinstance(e, MessageSent)}:
        detail, account = reader.get_message(id_), reader.explain_message(id_)
        told = {happened.position for happened in account.story}
        assert told >= {entry.position for entry in detail.history}
        deliveries = [e.position for e in detail.history if e.event == MessageReceived.__name__]
        assert [each.position for each in account.deliveries] == deliveries
        assert account.now
