"""What svc-mailbox promises, as plainly as it can be written down; shares no code with the domain.

Two times are known: `now`, the mailbox's log time, which may jump at a reboot; and `true`, which nobody in
the mailbox can see. Promises of the form "not before" are held against true time, whatever the clocks say.
All times are µs, all settings ms.
"""

from collections.abc import Collection
from fractions import Fraction
from typing import Any

from tests.simulation.model_state import (
    ACKED,
    DEAD,
    EXPIRY_GRACE,
    GONE,
    IN_FLIGHT,
    MS,
    READY,
    UNKNOWN,
    Key,
    Message,
    Topic,
)
from tests.simulation.model_turns import KeyRules, Turns


class Model(KeyRules):
    """A mailbox as svc-mailbox describes it."""

    def __init__(self, policy: Any, limits: Any, shards: dict[int, dict[str, int]]) -> None:
        self.default_policy = policy
        self.limits = limits
        self.shards = shards
        self.now = 0
        self.true = 0
        self.expiry_resumes_at = 0
        self.policies: dict[str, Any] = {}
        self.topics: dict[str, Topic] = {}
        self.paused: set[str] = set()
        self.messages: dict[str, Message] = {}
        self.turns = Turns()
        self.delivered: dict[int, str] = {}
        """Every delivery that reached a consumer, by its number: the message's id."""

    # -- time ---

    def pass_time(self, true: int) -> None:
        self.now += true - self.true
        self.true = true
        self.end_what_ran_out()

    def restart(self, now: int, last_at: int, *, time_went_on: bool) -> None:
        """Start again at log time `now`; where time did not go on, every "not before" starts anew.

        Arguments:
            last_at: log time of the last record: all that the mailbox knows of when it stopped.
        """
        self.turns.restart()
        if not time_went_on:
            self.expiry_resumes_at = now + EXPIRY_GRACE if last_at else 0
            for message in self.messages.values():
                if message.state == IN_FLIGHT:
                    message.due = now + message.hidden
            for topic in self.topics.values():
                topic.keys = self._keys_in_window(topic, last_at)
                for key in topic.keys.values():
                    key.accepted_at = now
        self.now = now
        self.end_what_ran_out()

    def end_what_ran_out(self, *, but: Collection[str] = (), but_over_capacity: Collection[str] = ()) -> None:
        """End deliveries that timed out, messages that nobody fetched, dead letters too old or too many.

        Arguments:
            but, but_over_capacity: messages, and topics with too many dead letters, of a killed process.
        """
        while overdue := [m for m in self.messages.values() if self._has_run_out(m) and m.id not in but]:
            for message, state in [(each, each.state) for each in overdue]:
                if message.state == state:  # else it returned to the queue behind an earlier one of its key
                    self._end(message)
        for name, topic in self.topics.items():
            while name not in but_over_capacity and len(topic.dead) > topic.policy.dead_capacity:
                self._expire(topic.dead[0], "capacity")

    def _may_be_delivered(self, message: Message) -> bool:
        return message.state == READY and message.due <= self.now and not self._is_overdue(message)

    def _has_run_out(self, message: Message) -> bool:
        expiry_pauses = message.state != IN_FLIGHT and self.now < self.expiry_resumes_at
        return self._is_overdue(message) and not expiry_pauses

    def _is_overdue(self, message: Message) -> bool:
        if message.state == IN_FLIGHT:
            return message.due <= self.now
        return message.state in (READY, DEAD) and message.expires_at <= self.now

    def _end(self, message: Message) -> None:
        policy = self.topics[message.topic].policy
        if message.state == DEAD:
            self._expire(message, "retention")
            return
        if message.state == READY:
            late = "ttl_expired" if message.has_ttl else "retention_expired"
            self._bury(message, late, message.last_error)
            return
        if message.attempt >= policy.max_attempts:
            self._bury(message, "max_attempts", message.last_error or "visibility expired")
        else:
            message.state, message.due = READY, self.now
        self._take_back(message)

    def _bury(self, message: Message, reason: str, error: str | None) -> None:
        topic = self.topics[message.topic]
        message.state, message.reason, message.last_error = DEAD, reason, error
        message.expires_at = self.now + topic.policy.dead_retention_ms * MS
        topic.dead.append(message)

    def _expire(self, message: Message, reason: str) -> None:
        if message.state == DEAD:
            self.topics[message.topic].dead.remove(message)
        message.state, message.reason = GONE, reason

    # -- commands: each takes what the mailbox answered, says if that was right, and follows ---

    def send(self, op: Any, answer: Any) -> None:
        allowed = self._answers_to_send(op)
        assert answer in allowed, f"{op} was answered {answer}; right would have been one of {allowed}"
        holder = self._holder(op.topic, op.unique_key)
        if answer != ("sent", op.id, False):
            if op.on_conflict == "reschedule" and holder is not None and answer == ("sent", holder.id, True):
                self._reschedule(holder, op.deliver_after_ms)
            return
        topic = self._topic(op.topic)
        policy = topic.policy
        ttl = self._kept_ms(op, policy)
        topic.shards_in_use = self._shard_count(op.topic)
        if holder is not None:
            assert op.on_conflict == "replace", f"{op} was sent beside {holder.id} with its unique key"
            self._expire(holder, "superseded")
        self.messages[op.id] = Message(
            op.id,
            op.topic,
            self.shards[topic.shards_in_use][op.sticky_key or op.topic],
            len(self.messages),
            op.payload,
            op.idem_key,
            self.now,
            expires_at=self.now + ttl * MS,
            due=self.now + op.deliver_after_ms * MS,
            has_ttl=ttl < policy.ready_retention_ms,
            priority=op.priority,
            ready_at=self.now + op.deliver_after_ms * MS,
            sticky_key=op.sticky_key,
            unique_key=op.unique_key,
        )
        if op.idem_key is not None:
            until = self.true + policy.replay_window_ms * MS
            topic.keys[op.idem_key] = Key(op.id, op.payload, self.now, until)

    def _holder(self, topic: str, unique_key: str | None) -> Message | None:
        """Return the unsettled message with a unique key."""
        holders = [
            m
            for m in self.messages.values()
            if (m.topic, m.unique_key) == (topic, unique_key) and m.state in (READY, IN_FLIGHT)
        ]
        assert unique_key is None or len(holders) <= 1, f"{holders} have the same unique key"
        return holders[0] if unique_key is not None and holders else None

    def _expires_first(self, message: Message, delay_ms: int) -> bool:
        due = self.now + delay_ms * MS
        return message.state == READY and message.has_ttl and due >= message.expires_at

    def _reschedule(self, message: Message, delay_ms: int) -> None:
        if message.state != READY:
            return
        self.turns.overtaken.get(message.topic, {}).pop(message.sticky_key, None)
        message.due = self.now + delay_ms * MS
        if not message.has_ttl:
            message.expires_at = message.due + self.topics[message.topic].policy.ready_retention_ms * MS
        if not message.attempt:
            message.ready_at = message.due

    def _kept_ms(self, op: Any, policy: Any) -> int:
        """Return how long a message is kept: retention begins when it is due, a time to live when sent."""
        retained = op.deliver_after_ms + policy.ready_retention_ms
        return int(min(op.ttl_seconds * 1_000 or retained, retained))

    def _answers_to_send(self, op: Any) -> list[Any]:
        if op.id in self.messages:
            is_same = self.messages[op.id].payload == op.payload
            return [("sent", op.id, True) if is_same else "IdempotencyConflict"]
        topic = self.topics.get(op.topic)
        policy = topic.policy if topic else self._policy(op.topic)
        as_new: list[Any] = [("sent", op.id, False)]
        shard = self.shards[self._shard_count(op.topic)][op.sticky_key or op.topic]
        holder = self._holder(op.topic, op.unique_key)
        held = [m for m in self.unsettled(op.topic, shard) if m is not holder]
        if sum(not self._has_run_out(m) for m in held) >= policy.shard_capacity:
            as_new = ["Saturated"]
        elif len(held) >= policy.shard_capacity:  # what has just run out of time may or may not be gone
            as_new.append("Saturated")
        if op.deliver_after_ms and op.deliver_after_ms >= self._kept_ms(op, policy):
            as_new = ["InvalidRequest"]
        if holder is not None and op.on_conflict != "replace":
            as_new = [("sent", holder.id, True)]
            if op.on_conflict == "reschedule" and self._expires_first(holder, op.deliver_after_ms):
                as_new = ["InvalidRequest"]
        if topic is None or op.idem_key is None:
            return as_new
        # A key is sure to be remembered while true time protects it; after a clock jump, perhaps longer.
        keys = self._keys_in_window(topic, self.now)
        sure = [key for key in topic.keys.values() if self.true < key.protected_until_true]
        if len(sure) >= policy.replay_capacity:
            as_new = ["Saturated"]
        elif len(keys) >= policy.replay_capacity:
            as_new.append("Saturated")
        key = keys.get(op.idem_key)
        if key is None:
            return as_new
        as_repeat = [("sent", key.message, True)] if key.payload == op.payload else ["IdempotencyConflict"]
        return as_repeat if key in sure else as_repeat + as_new

    def receive(self, op: Any, answer: Any) -> None:
        """Take the deliveries `(number, id, attempt, payload, shard)` that answered, or the error's name."""
        if op.visibility_ms < 250 or not 1 <= op.max_messages <= self.limits.max_messages:
            assert answer == "InvalidRequest"
            return
        room = self.limits.in_flight_ceiling - self.count_in_flight()
        if room <= 0:
            assert answer == "Saturated", f"{op} was answered {answer} above the in-flight ceiling"
            return
        assert isinstance(answer, list), f"{op} was answered {answer}"
        if op.topic in self.paused:
            assert answer == [], f"{op} got {len(answer)} messages of a paused topic"
            return
        for _, id_, attempt, payload, shard in answer:
            message = self.messages[id_]
            topic = self.topics[message.topic]
            assert message.state == READY, f"{id_} was delivered while {message.state}"
            assert not self._is_overdue(message), f"{id_} was delivered after its time"
            assert message.due <= self.now, f"{id_} was delivered {message.due - self.now} µs early"
            assert message.hidden_until_true <= self.true, f"{id_} reappeared before its visibility ended"
            assert attempt == message.attempt + 1
            assert attempt <= topic.largest["max_attempts"], f"{id_} was delivered {attempt} times"
            assert (payload, shard) == (message.payload, message.shard)
        heads = [m for m in map(self.messages.get, [id_ for _, id_, *_ in answer]) if m and self._has_turn(m)]
        in_turn = {message.id for message in self._with_followers(heads)}
        for _, id_, *_ in answer:
            assert id_ in in_turn, f"{id_} was delivered before its turn"
        self._check_order(op, [self.messages[id_] for _, id_, *_ in answer], min(room, op.max_messages))
        before: str | None = None
        for number, id_, attempt, *_ in answer:
            message = self.messages[id_]
            policy = self.topics[message.topic].policy
            if policy.fair_keys or policy.max_in_flight or policy.rate:
                assert self._allowed_by_key(message.topic, message.sticky_key) >= 1, f"{id_}: above a limit"
                assert self._allowed_by_topic(message.topic, policy) >= 1, f"{id_}: above a limit"
                goes_on = (
                    policy.ordered_keys and message.sticky_key is not None and before == message.sticky_key
                )
                waiting = self._waiting_keys(message.topic)
                counted_as = self.counted_as(message.topic)
                self.turns.deliver(message, waiting, policy, self.now, goes_on=goes_on, counted_as=counted_as)
            before = message.sticky_key
            message.state, message.attempt, message.delivery = IN_FLIGHT, attempt, number
            message.received_at = self.now
            message.visibility = op.visibility_ms * MS
            self._hide(message, op.visibility_ms * MS)
            self.delivered[number] = id_

    def _check_order(self, op: Any, got: list[Message], most: int) -> None:
        assert len(got) <= most, f"{op} got {len(got)} messages"
        size = sum(len(message.payload) for message in got)
        assert size <= op.max_bytes or len(got) == 1, f"{op} got {size} bytes"
        policy = self.topics[op.topic].policy if op.topic in self.topics else self._policy(op.topic)
        if policy.fair_keys:
            leftover = self._check_order_of_keys(op.topic, got)
        else:
            leftover = self._check_order_of_shards(op, got)
        room = min(most, self._allowed_by_topic(op.topic, policy))
        assert len(got) <= room, f"{op} got {len(got)} messages above the limits of its topic"
        if len(got) < room and leftover:
            full = any(size + len(m.payload) > op.max_bytes for m in leftover)
            assert got, f"{op} got nothing though messages were ready"
            assert full, f"{op} got {len(got)} messages though more were ready"

    def _check_order_of_shards(self, op: Any, got: list[Message]) -> list[Message]:
        """Check that each shard is served in its order; return the messages that could follow."""
        leftover = []
        for shard in sorted({m.shard for m in self.messages.values()}):
            waiting = [m for m in self.unsettled(op.topic, shard) if self._is_deliverable(m)]
            waiting = self._with_followers(sorted(waiting, key=self._precedence))
            taken = [m for m in got if m.shard == shard]
            in_order = [m.id for m in waiting[: len(taken)]]
            assert [m.id for m in taken] == in_order, f"shard {shard} was not served in order"
            leftover += waiting[len(taken) : len(taken) + 1]
        return leftover

    def _precedence(self, message: Message) -> tuple[Fraction, int]:
        """Sort first in, first out; where the policy asks for it, by priority and age before."""
        policy = self.topics[message.topic].policy
        if not policy.priorities:
            return Fraction(0), message.rank
        age = Fraction(self.now - message.ready_at, policy.priority_aging_ms * MS)
        return -(message.priority + age), message.rank

    def ack(self, number: int, answer: Any) -> None:
        message = self._current(number, settled_too=True)
        if message is None:
            assert answer in ("StaleReceipt", UNKNOWN), (
                f"the ack of a delivery that is over was answered {answer}"
            )
            return
        if message.state != ACKED and self._ends_first(message) is not None:
            expected = "StaleReceipt" if message.state == READY else "InvalidRequest"
            assert answer in (expected, UNKNOWN), (
                f"the ack of {message.id} before others was answered {answer}"
            )
            return
        assert answer in (None, UNKNOWN), f"the ack of {message.id} was answered {answer}"
        message.state = ACKED

    def release(self, message: Message, delay_ms: int = 0) -> None:
        """Return a message in flight to the queue, as its receiver has given up."""
        message.state, message.delivery, message.attempt = READY, None, message.attempt - 1
        message.due = self.now + delay_ms * MS
        message.hidden_until_true = 0
        self._take_back(message)

    def nack(self, number: int, op: Any, answer: Any) -> None:
        message = self._current(number)
        if message is None:
            assert answer in ("StaleReceipt", UNKNOWN), (
                f"the nack of a delivery that is over was answered {answer}"
            )
            return
        assert answer in (None, UNKNOWN), f"the nack of {message.id} was answered {answer}"
        if op.action == "reject":
            self._bury(message, "rejected", op.reason or message.last_error)
            self._take_back(message)
            return
        if message.state == READY:
            return
        if op.action == "release":
            self.release(message, op.delay_ms or 0)
            return
        policy = self.topics[message.topic].policy
        if message.attempt >= policy.max_attempts:
            self._bury(message, "max_attempts", op.reason or message.last_error)
            self._take_back(message)
            return
        backoff = int(op.jitter * min(policy.backoff_max_ms, policy.backoff_base_ms * 2**message.attempt))
        message.state, message.delivery = READY, None
        message.due = self.now + (backoff if op.delay_ms is None else op.delay_ms) * MS
        message.hidden_until_true = 0
        message.last_error = op.reason
        self._take_back(message)

    def extend(self, number: int, op: Any, answer: Any) -> None:
        message = self._current(number)
        if message is not None and op.visibility_ms < 250:
            assert answer in ("InvalidRequest", UNKNOWN)
            return
        due = 0
        if message is not None and message.state == IN_FLIGHT:
            policy = self.topics[message.topic].policy
            longest = message.received_at + message.visibility * policy.in_flight_retention_visibilities
            due = min(self.now + op.visibility_ms * MS, longest)
        if message is None or due <= self.now:
            assert answer in ("StaleReceipt", "InvalidRequest", UNKNOWN), (
                f"an extension too late was answered {answer}"
            )
            return
        assert answer in (None, UNKNOWN), f"the extension of {message.id} was answered {answer}"
        self._hide(message, due - self.now)

    def _hide(self, message: Message, duration: int) -> None:
        message.due = self.now + duration
        message.hidden = duration
        message.hidden_until_true = self.true + duration

    def _current(self, number: int, *, settled_too: bool = False) -> Message | None:
        message = self.messages[self.delivered[number]]
        states = (READY, IN_FLIGHT, ACKED) if settled_too else (READY, IN_FLIGHT)
        return message if message.delivery == number and message.state in states else None

    def redrive(self, op: Any, answer: Any) -> None:
        topic = self.topics.get(op.topic)
        if topic is None:
            assert answer in ("NotFound", UNKNOWN)
            return
        revived: list[Message] = []
        held = {m.unique_key for m in self.messages.values() if self._holder(op.topic, m.unique_key)}
        free: list[Message] = []
        for message in topic.dead:
            if message.unique_key is None or message.unique_key not in held:
                held.add(message.unique_key)
                free.append(message)
        for message in free[: op.limit]:
            coming = sum(m.shard == message.shard for m in revived)
            waiting = len(self.unsettled(op.topic, message.shard))
            if waiting + coming >= topic.policy.shard_capacity:
                break
            revived.append(message)
        expected = len(revived) if revived or not free else "Saturated"
        assert answer in (expected, UNKNOWN), f"{op} was answered {answer} instead of {expected}"
        for message in revived:
            topic.dead.remove(message)
            message.state, message.attempt, message.delivery, message.due = READY, 0, None, self.now
            message.ready_at = self.now
            message.expires_at = self.now + topic.policy.ready_retention_ms * MS
            message.has_ttl = False
            message.hidden_until_true = 0
            message.redriven += 1

    def purge(self, op: Any, answer: Any) -> None:
        if op.topic not in self.topics:
            assert answer in ("NotFound", UNKNOWN)
            return
        states = [DEAD] * op.dead + [READY] * op.ready
        doomed = [m for m in self.messages.values() if m.topic == op.topic and m.state in states]
        assert answer in (len(doomed), UNKNOWN), f"{op} was answered {answer} instead of {len(doomed)}"
        for message in doomed:
            self._expire(message, "purged")

    def cancel(self, op: Any, answer: Any) -> None:
        message = self._changed(op, answer, (READY, IN_FLIGHT))
        if message is not None:
            self._expire(message, "cancelled")

    def reschedule(self, op: Any, answer: Any) -> None:
        message = self._changed(op, answer, (READY,))
        if message is not None:
            self._reschedule(message, op.deliver_after_ms)

    def _changed(self, op: Any, answer: Any, states: Collection[str]) -> Message | None:
        """Return the message that was to be changed if it was."""
        message = self.messages.get(op.id)
        if message is None:
            expected = "unknown"
        elif message.state in states:
            is_late = states == (READY,) and self._expires_first(message, op.deliver_after_ms)
            expected = "expires_first" if is_late else "changed"
        else:
            expected = {IN_FLIGHT: "in_flight", DEAD: "dead"}.get(message.state, "settled")
        assert answer in (expected, UNKNOWN), f"{op} was answered {answer} instead of {expected}"
        return message if expected == "changed" else None

    def set_policy(self, op: Any, answer: Any) -> None:
        topic = self.topics.get(op.topic)
        assert answer in (None, UNKNOWN), f"{op} was answered {answer}"
        counted_as = self.counted_as(op.topic)
        self.policies[op.topic] = op.policy
        if topic is not None:
            change = (op.policy.replay_window_ms - topic.policy.replay_window_ms) * MS
            topic.keys = self._keys_in_window(topic, self.now)
            for key in topic.keys.values():
                key.protected_until_true += change
            self.turns.change_policy(op.topic, topic.policy, op.policy, self.now, counted_as)
            topic.allow(op.policy)

    def pause(self, op: Any, answer: Any) -> None:
        if self._answers_to_pause(op.topic, answer):
            self.paused.add(op.topic)

    def resume(self, op: Any, answer: Any) -> None:
        if self._answers_to_pause(op.topic, answer):
            self.paused.discard(op.topic)

    def _answers_to_pause(self, topic: str, answer: Any) -> bool:
        exists = topic in self.topics or topic in self.policies
        expected = None if exists else "NotFound"
        assert answer == expected, f"{topic} was answered {answer} instead of {expected}"
        return exists

    # -- what it looks like now ---

    def unsettled(self, topic: str, shard: int) -> list[Message]:
        """Return the messages of a shard that wait or are in flight, oldest first."""
        return [
            m
            for m in self.messages.values()
            if m.topic == topic and m.shard == shard and m.state in (READY, IN_FLIGHT)
        ]

    def _keys_in_window(self, topic: Topic, now: int) -> dict[str, Key]:
        window = topic.policy.replay_window_ms * MS
        return {
            name: key
            for name, key in topic.keys.items()
            if now < key.accepted_at + window or self.true < key.protected_until_true
        }

    def count(self) -> dict[tuple[str, int], tuple[int, int, int, int]]:
        """Count the ready, delayed, in-flight and dead messages of each shard that has any."""
        counts: dict[tuple[str, int], list[int]] = {}
        for message in self.messages.values():
            delayed = message.state == READY and message.due > self.now
            kind = "delayed" if delayed else message.state
            if kind in (columns := [READY, "delayed", IN_FLIGHT, DEAD]):
                counts.setdefault((message.topic, message.shard), [0, 0, 0, 0])[columns.index(kind)] += 1
        return {shard: (row[0], row[1], row[2], row[3]) for shard, row in counts.items()}

    def count_in_flight(self) -> int:
        return sum(message.state == IN_FLIGHT for message in self.messages.values())

    def _holds_messages(self, topic: str) -> bool:
        return any(m.topic == topic and m.state in (READY, IN_FLIGHT, DEAD) for m in self.messages.values())

    def _shard_count(self, topic: str) -> int:
        """Return the number of shards for the next message: another one waits until the topic is empty."""
        if topic in self.topics and self._holds_messages(topic):
            return self.topics[topic].shards_in_use
        return int(self._policy(topic).shards)

    def _policy(self, topic: str) -> Any:
        return self.policies.get(topic, self.default_policy)

    def _topic(self, name: str) -> Topic:
        if name not in self.topics:
            self.topics[name] = Topic(self._policy(name))
        return self.topics[name]
