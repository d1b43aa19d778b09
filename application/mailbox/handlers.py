"""The command handlers of one mailbox."""

from collections.abc import Callable

from postroom.application.delivery_window import DeliveryWindows
from postroom.application.mailbox.administer import (
    PauseTopic,
    PurgeTopic,
    RedriveDeadLetters,
    ResumeTopic,
    SetMailboxSettings,
    SetTopicPolicy,
)
from postroom.application.mailbox.message_factory import MessageFactory, NewId
from postroom.application.mailbox.receive import ReceiveMessages
from postroom.application.mailbox.send import SendBatch, SendEnvelopes, SendMessage
from postroom.application.mailbox.settle import make_settler
from postroom.application.mailbox.stream import StreamMessages
from postroom.application.ports.mailbox_owner import MailboxOwner


class CommandHandlers:
    """The command handlers of one mailbox, over its owner; each is an async callable."""

    def __init__(self, owner: MailboxOwner, wall: Callable[[], int], new_id: NewId) -> None:
        """Initialise with the owner, the wall clock in µs, and a generator of UUIDv7s."""
        factory = MessageFactory(owner.name, wall, new_id)
        self._name = owner.name
        self.send_message = SendMessage(owner, factory)
        self.send_batch = SendBatch(owner, factory)
        self.send_envelopes = SendEnvelopes(owner, factory)
        windows = DeliveryWindows()
        settler = make_settler(owner, windows)
        self.receive_messages = ReceiveMessages(owner, settler)
        self.stream_messages = StreamMessages(self.receive_messages, settler.nack_messages, windows)
        self.ack_messages = settler.ack_messages
        self.nack_messages = settler.nack_messages
        self.extend_visibility = settler.extend_visibility
        self.redrive_dead_letters = RedriveDeadLetters(owner)
        self.purge_topic = PurgeTopic(owner)
        self.set_settings = SetMailboxSettings(owner)
        self.set_topic_policy = SetTopicPolicy(owner)
        self.pause_topic = PauseTopic(owner)
        self.resume_topic = ResumeTopic(owner)

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._name
