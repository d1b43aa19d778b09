"""Every operation of the surfaces by kinds of identifiers, and who must be refused.

What is expected follows from the operations that a call needs and from the topics of what it names, never
from an answer that was seen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.messages import write_receipt
from postroom.domain.capability.rights import Right
from postroom.domain.message import Receipt
from postroom.domain.search import Cursor

OWN, FOREIGN = "orders.eu", "payments"
UNKNOWN = "unknown"
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
"""Id of a redrive job that does not exist."""
"""What does not exist, which must look like what is of another topic."""
EVERYTHING = "everything"
"""All topics of the mailbox."""
ALLOWED, UNAUTHENTICATED, FORBIDDEN = "", "E_CAP_AUTH", "E_CAP_SCOPE"
CURSOR = Cursor(1, 1).encode()
"""Of another search."""
SEND, RECV, REDRIVE = (Right.SEND,), (Right.RECV,), (Right.REDRIVE,)
ADMIN, HEADERS = (Right.ADMIN,), (Right.READ_HEADERS,)
PAYLOAD = (Right.READ_HEADERS, Right.READ_PAYLOAD)


class Known(NamedTuple):
    """What exists of one topic: a message in flight with its receipt, and a dead letter."""

    message_id: str
    receipt: Receipt
    dead_id: str


class Case(NamedTuple):
    """One request.

    Arguments:
        name: route or method.
        needs: all the operations that it needs.
        topics: `OWN`, `FOREIGN`, `UNKNOWN` or `EVERYTHING`, for each thing that it names.
        request: method, target and body of HTTP, or the message of gRPC.
        alone: each thing gets an answer of its own.
    """

    name: str
    needs: tuple[Right, ...]
    topics: tuple[str, ...]
    request: Any
    alone: bool = False


class Scope(NamedTuple):
    """What a token is for.

    Arguments:
        operations: None if it must not be accepted at all.
        topics: whether it is limited to the own topic.
        mailbox: whether it covers the mailbox.
    """

    operations: frozenset[Right] | None
    topics: bool = False
    mailbox: bool = True


def expected(scope: Scope, case: Case) -> list[str]:
    """Return the code of each answer; `ALLOWED` for any other than a refusal for want of rights."""
    count = len(case.topics) if case.alone else 1
    if scope.operations is None:
        return [UNAUTHENTICATED] * count
    if case.needs and not (scope.mailbox and scope.operations.issuperset(case.needs)):
        return [FORBIDDEN] * count
    codes = [FORBIDDEN if scope.topics and each != OWN else ALLOWED for each in case.topics]
    return codes if case.alone else [max(codes, default=ALLOWED)]


def known_of_nothing() -> dict[str, Known]:
    """Return what may be named while nothing exists."""
    return {each: Known(each, Receipt(bytes(16), 1, 1), each) for each in (OWN, FOREIGN, UNKNOWN)}


def http_cases(known: dict[str, Known]) -> Sequence[Case]:
    """Return the requests of HTTP."""
    cases: list[Case] = []

    def add(
        route: str,
        needs: tuple[Right, ...],
        things: Sequence[str],
        body: Any = None,
        *,
        path: dict[str, str] | None = None,
        alone: bool = False,
        **query: Any,
    ) -> None:
        method, target = route.split(" ")
        for name, value in (path or {}).items():
            target = target.replace(f"{{{name}}}", value)
        if query:
            target += "?" + urlencode(query, doseq=True)
        cases.append(Case(route, needs, tuple(things), (method, target, body), alone))

    for topic in (OWN, FOREIGN):
        add("POST /v1/send", SEND, [topic], _send(topic))
        add("POST /v1/recv", RECV, [topic], {"topic": topic, "max_messages": 1})
        add("POST /v1/recv/stream", RECV, [topic], {"topic": topic, "max_messages": 1, "wait_ms": 1})
        add("GET /v1/backlog", HEADERS, [topic], topic=topic)
        add("GET /v1/backlog", HEADERS, [topic], topic=topic, at=1)
        add("GET /v1/dlq", HEADERS, [topic], topic=topic, cursor=1)
        add("GET /v1/dlq/groups", HEADERS, [topic], topics=topic)
        add("GET /v1/dlq/groups", HEADERS, [topic], topics=f"{topic}*", text="x")
        add("GET /v1/peek", PAYLOAD, [topic], topic=topic)
        add("GET /v1/messages", HEADERS, [topic], topics=topic, cursor=CURSOR)
        add("GET /v1/messages", HEADERS, [topic], topics=f"{topic}*")
        add("GET /v1/messages", PAYLOAD, [topic], topics=topic, match="word")
        for operator in ("pause", "resume"):
            add(f"PUT /v1/topics/{{topic}}/{operator}", ADMIN, [topic], path={"topic": topic})
        add("GET /v1/topics/{topic}/report", HEADERS, [topic], path={"topic": topic})
        add("GET /v1/topics/{topic}/policy", HEADERS, [topic], path={"topic": topic})
        add("PUT /v1/topics/{topic}/policy", ADMIN, [topic], {"max_attempts": 1}, path={"topic": topic})
        add("POST /v1/topics/{topic}/purge", ADMIN, [topic], {"dead": False}, path={"topic": topic})
        add(
            "POST /v1/dlq/reprocess",
            REDRIVE,
            [topic],
            {"topic": topic, "message_ids": [known[topic].dead_id]},
        )
    add("GET /v1/settings", HEADERS, [EVERYTHING])
    add("PUT /v1/settings", ADMIN, [EVERYTHING], {"changes": {}})
    add("POST /v1/settings/preview", ADMIN, [EVERYTHING], {"changes": {}})
    own, place = {"filter": {"topics": [OWN]}}, {"name": OWN}
    add("PUT /v1/subscriptions/{name}", ADMIN, [EVERYTHING], own, path={"name": "copies"})
    add("POST /v1/subscriptions/{name}/rewind", ADMIN, [EVERYTHING], {"start": 0}, path=place)
    add("DELETE /v1/subscriptions/{name}", ADMIN, [EVERYTHING], path=place)
    add("GET /v1/subscriptions", HEADERS, [])
    nightly, daily = {"name": "nightly"}, {"schedule": {"topic": OWN, "every_ms": 86_400_000}}
    add("PUT /v1/schedules/{name}", ADMIN, [EVERYTHING], daily, path=nightly)
    add("PUT /v1/schedules/{name}/pause", ADMIN, [EVERYTHING], path=nightly)
    add("PUT /v1/schedules/{name}/resume", ADMIN, [EVERYTHING], path=nightly)
    add("POST /v1/schedules/{name}/run", ADMIN, [EVERYTHING], path=nightly)
    add("DELETE /v1/schedules/{name}", ADMIN, [EVERYTHING], path=nightly)
    add("GET /v1/schedules", HEADERS, [])
    for topic in (OWN, FOREIGN):
        add("POST /v1/searches", REDRIVE, [topic], {"name": "Dead", "query": f"topics={topic}&statuses=dead"})
    add("POST /v1/searches", REDRIVE, [EVERYTHING], {"name": "Dead", "query": "statuses=dead"})
    add("DELETE /v1/searches/{search_id}", REDRIVE, [UNKNOWN], path={"search_id": JOB})
    add("GET /v1/searches", HEADERS, [])
    foreign_dead = {"topic": OWN, "message_ids": [known[FOREIGN].dead_id, UNKNOWN]}
    add("POST /v1/dlq/reprocess", REDRIVE, [OWN], foreign_dead)  # there is none of this topic with these ids
    for topics in ([OWN, FOREIGN], [FOREIGN, OWN]):
        add("POST /v1/send", SEND, topics, [_send(each) for each in topics], alone=True)
        add("POST /v1/recv", RECV, topics, {"topic": topics, "max_messages": 1})
        add("POST /v1/recv/stream", RECV, topics, {"topic": topics, "max_messages": 1, "wait_ms": 1})
        add("GET /v1/messages", HEADERS, topics, topics=topics)
    add("GET /v1/messages", HEADERS, [EVERYTHING])
    add("GET /v1/messages", HEADERS, [EVERYTHING], topics="*")
    add("GET /v1/messages", HEADERS, [EVERYTHING], topics="o*")
    for topic, each in known.items():
        add("GET /v1/messages", HEADERS, [EVERYTHING], message_id=each.message_id)
        add("GET /v1/messages/{msg_id}", PAYLOAD, [topic], path={"msg_id": each.message_id})
        add("GET /v1/messages/{msg_id}/result", PAYLOAD, [topic], path={"msg_id": each.message_id})
        add("GET /v1/messages/{msg_id}/explanation", HEADERS, [topic], path={"msg_id": each.message_id})
        for verb, more in _VERBS:
            path = {"msg_id": each.message_id}
            add(f"POST /v1/{verb}/{{msg_id}}", (Right(verb),), [topic], more, path=path)
            body = more | {"receipt": write_receipt(each.receipt)}
            add(f"POST /v1/{verb}/{{msg_id}}", (Right(verb),), [topic], body, path=path)
    for verb, more in _VERBS:
        body = more | {"receipts": [write_receipt(each.receipt) for each in known.values()]}
        add(f"POST /v1/{verb}", (Right(verb),), [*known], body, alone=True)
    add("POST /v1/cancel", ADMIN, [], {"ids": [UNKNOWN]})  # what is of other topics is unknown, too
    add("POST /v1/reschedule", ADMIN, [], {"ids": [UNKNOWN], "deliver_after_ms": 0})
    add("GET /v1/backlog", HEADERS, [])
    add("GET /v1/dlq", HEADERS, [])
    add("GET /v1/dlq", HEADERS, [], at=4)
    add("GET /v1/topics", HEADERS, [])
    add("GET /v1/consumers", HEADERS, [])
    add("GET /v1/workers", HEADERS, [])
    add("PUT /v1/workers/{id}", RECV, [], {"worker": WORKER}, path={"id": JOB})
    for topic in (OWN, FOREIGN):
        spec = {"topics": [topic], "message_ids": [UNKNOWN]}
        add("POST /v1/redrives/preview", (*HEADERS, *REDRIVE), [topic], spec)
        add("POST /v1/redrives", REDRIVE, [topic], {"spec": spec})
        add("POST /v1/redrives", (*PAYLOAD, *REDRIVE), [topic], {"spec": spec | {"match": "word"}})
        add("POST /v1/redrives", ADMIN, [topic], {"spec": spec | {"action": "purge"}})
        copies = {"spec": spec | {"destination": FOREIGN, "merge_patch": "{}"}}
        add("POST /v1/redrives", (*REDRIVE, *SEND), [topic, FOREIGN], copies)
    add("POST /v1/redrives", REDRIVE, [EVERYTHING], {"spec": {"message_ids": [UNKNOWN]}})
    add("GET /v1/redrives", REDRIVE, [])
    add("GET /v1/redrives/{job_id}", REDRIVE, [EVERYTHING], path={"job_id": JOB})
    add("GET /v1/redrives/{job_id}/messages", REDRIVE, [EVERYTHING], path={"job_id": JOB}, limit=1)
    for change in ("pause", "resume", "cancel", "undo"):
        add(f"PUT /v1/redrives/{{job_id}}/{change}", REDRIVE, [EVERYTHING], path={"job_id": JOB})
    add("GET /v1/mailbox", (), [])
    add("POST /v1/log/delete", ADMIN, [EVERYTHING], {"older_than_us": 1})
    add("GET /metrics", HEADERS, [EVERYTHING])
    return cases


def grpc_cases(known: dict[str, Known]) -> Sequence[Case]:
    """Return the requests of gRPC."""
    cases: list[Case] = []

    def add(
        name: str, needs: tuple[Right, ...], topics: Sequence[str], request: Any, *, alone: bool = False
    ) -> None:
        cases.append(Case(name, needs, tuple(topics), request, alone))

    for topic in (OWN, FOREIGN):
        new = pb.NewMessage(topic=topic, payload=b"x")
        add("send", SEND, [topic], pb.SendRequest(message=new))
        add("recv", RECV, [topic], pb.RecvRequest(topics=[topic], max_messages=1))
        add(
            "recv_stream",
            RECV,
            [topic],
            pb.RecvStreamRequest(topics=[topic], max_messages=1, heartbeat_ms=250),
        )
        add("query", HEADERS, [topic], pb.QueryRequest(topics=[topic], cursor=CURSOR))
        add("query", HEADERS, [topic], pb.QueryRequest(topics=[f"{topic}*"]))
        add("query", PAYLOAD, [topic], pb.QueryRequest(topics=[topic], match="word"))
        add("backlog", HEADERS, [topic], pb.BacklogRequest(topic=topic))
        add("backlog", HEADERS, [topic], pb.BacklogRequest(topic=topic, at=pb.Moment(position=1)))
        add("list_dead_letters", HEADERS, [topic], pb.ListDeadLettersRequest(topic=topic, cursor=1))
        add("peek", PAYLOAD, [topic], pb.PeekRequest(topic=topic))
        add("pause_topic", ADMIN, [topic], pb.PauseTopicRequest(topic=topic))
        add("resume_topic", ADMIN, [topic], pb.ResumeTopicRequest(topic=topic))
        add("get_topic_policy", HEADERS, [topic], pb.GetTopicPolicyRequest(topic=topic))
        add("describe_topic", HEADERS, [topic], pb.DescribeTopicRequest(topic=topic))
        policy = pb.TopicPolicy(max_attempts=1)
        add("set_topic_policy", ADMIN, [topic], pb.SetTopicPolicyRequest(topic=topic, policy=policy))
        add("purge", ADMIN, [topic], pb.PurgeRequest(topic=topic, dead=False))
        only = pb.MessageIds(message_ids=[known[topic].dead_id])
        add("redrive", REDRIVE, [topic], pb.RedriveRequest(topic=topic, only=only))
    add("get_settings", HEADERS, [EVERYTHING], pb.GetSettingsRequest())
    add("set_settings", ADMIN, [EVERYTHING], pb.SetSettingsRequest())
    add("preview_settings", ADMIN, [EVERYTHING], pb.PreviewSettingsRequest())
    own = pb.SubscriptionFilter(topics=[OWN])
    start = pb.Moment(position=0)
    add("set_subscription", ADMIN, [EVERYTHING], pb.SetSubscriptionRequest(name="copies", filter=own))
    add("rewind_subscription", ADMIN, [EVERYTHING], pb.RewindSubscriptionRequest(name=OWN, start=start))
    add("delete_subscription", ADMIN, [EVERYTHING], pb.DeleteSubscriptionRequest(name=OWN))
    add("list_subscriptions", HEADERS, [], pb.ListSubscriptionsRequest())
    daily = pb.ScheduleSpec(topic=OWN, every_ms=86_400_000)
    add("set_schedule", ADMIN, [EVERYTHING], pb.SetScheduleRequest(name="nightly", schedule=daily))
    add("pause_schedule", ADMIN, [EVERYTHING], pb.PauseScheduleRequest(name="nightly"))
    add("resume_schedule", ADMIN, [EVERYTHING], pb.ResumeScheduleRequest(name="nightly"))
    add("run_schedule", ADMIN, [EVERYTHING], pb.RunScheduleRequest(name="nightly"))
    add("delete_schedule", ADMIN, [EVERYTHING], pb.DeleteScheduleRequest(name="nightly"))
    add("list_schedules", HEADERS, [], pb.ListSchedulesRequest())
    for topic in (OWN, FOREIGN):
        add("save_search", REDRIVE, [topic], pb.SaveSearchRequest(name="dead", query=f"topics={topic}"))
    add("delete_search", REDRIVE, [UNKNOWN], pb.DeleteSearchRequest(search_id=JOB))
    add("list_searches", HEADERS, [], pb.ListSearchesRequest())
    only = pb.MessageIds(message_ids=[known[FOREIGN].dead_id, UNKNOWN])
    add("redrive", REDRIVE, [OWN], pb.RedriveRequest(topic=OWN, only=only))
    for topics in ([OWN, FOREIGN], [FOREIGN, OWN]):
        batch = [pb.NewMessage(topic=each, payload=b"x") for each in topics]
        add("send_batch", SEND, topics, pb.SendBatchRequest(messages=batch), alone=True)
        add("recv", RECV, topics, pb.RecvRequest(topics=topics, max_messages=1))
        add(
            "recv_stream", RECV, topics, pb.RecvStreamRequest(topics=topics, max_messages=1, heartbeat_ms=250)
        )
        add("query", HEADERS, topics, pb.QueryRequest(topics=topics))
    for glob in ([], ["*"], ["o*"]):
        add("query", HEADERS, [EVERYTHING], pb.QueryRequest(topics=glob))
    for topic, each in known.items():
        add("query", HEADERS, [EVERYTHING], pb.QueryRequest(message_id=each.message_id))
        add("get", PAYLOAD, [topic], pb.GetRequest(message_id=each.message_id))
        add("wait_for_result", PAYLOAD, [topic], pb.WaitForResultRequest(message_id=each.message_id))
        add("explain", HEADERS, [topic], pb.ExplainRequest(message_id=each.message_id))
    receipts = [write_receipt(each.receipt) for each in known.values()]
    add("ack", (Right.ACK,), [*known], pb.AckRequest(receipts=receipts), alone=True)
    add("nack", (Right.NACK,), [*known], pb.NackRequest(receipts=receipts), alone=True)
    extend = pb.ExtendRequest(receipts=receipts, visibility_ms=60_000)
    add("extend", (Right.EXTEND,), [*known], extend, alone=True)
    for topic in (OWN, FOREIGN):
        spec = pb.RedriveSpec(topics=[topic], message_ids=[UNKNOWN])
        words = pb.RedriveSpec(topics=[topic], message_ids=[UNKNOWN], match="word")
        purge = pb.RedriveSpec(topics=[topic], message_ids=[UNKNOWN], action="purge")
        add("preview_redrive", (*HEADERS, *REDRIVE), [topic], pb.PreviewRedriveRequest(spec=spec))
        add("start_redrive", REDRIVE, [topic], pb.StartRedriveRequest(spec=spec))
        add("start_redrive", (*PAYLOAD, *REDRIVE), [topic], pb.StartRedriveRequest(spec=words))
        add("start_redrive", ADMIN, [topic], pb.StartRedriveRequest(spec=purge))
        copies = pb.RedriveSpec(topics=[topic], message_ids=[UNKNOWN], destination=FOREIGN)
        add("start_redrive", (*REDRIVE, *SEND), [topic, FOREIGN], pb.StartRedriveRequest(spec=copies))
    every = pb.RedriveSpec(message_ids=[UNKNOWN])
    add("start_redrive", REDRIVE, [EVERYTHING], pb.StartRedriveRequest(spec=every))
    add("list_redrives", REDRIVE, [], pb.ListRedrivesRequest())
    add("get_redrive", REDRIVE, [EVERYTHING], pb.GetRedriveRequest(job_id=JOB))
    add("list_redrive_messages", REDRIVE, [EVERYTHING], pb.ListRedriveMessagesRequest(job_id=JOB))
    add("change_redrive", REDRIVE, [EVERYTHING], pb.ChangeRedriveRequest(job_id=JOB, action="undo"))
    add("cancel_messages", ADMIN, [], pb.CancelMessagesRequest(ids=[UNKNOWN]))
    add("reschedule_messages", ADMIN, [], pb.RescheduleMessagesRequest(ids=[UNKNOWN], deliver_after_ms=0))
    add("backlog", HEADERS, [], pb.BacklogRequest())
    add("list_dead_letters", HEADERS, [], pb.ListDeadLettersRequest())
    add("list_dead_letters", HEADERS, [], pb.ListDeadLettersRequest(at=pb.Moment(position=4)))
    add("list_topics", HEADERS, [], pb.ListTopicsRequest())
    add("list_consumers", HEADERS, [], pb.ListConsumersRequest())
    add("list_workers", HEADERS, [], pb.ListWorkersRequest())
    add("report_worker", RECV, [], pb.ReportWorkerRequest(id=JOB, worker=pb.WorkerState(name="shop")))
    add("info", (), [], pb.InfoRequest())
    add("delete_old_events", ADMIN, [EVERYTHING], pb.DeleteOldEventsRequest(older_than_us=1))
    return cases


WORKER = {"name": "shop"}
_VERBS: list[tuple[str, dict[str, Any]]] = [("ack", {}), ("nack", {}), ("extend", {"visibility_ms": 60_000})]


def _send(topic: str) -> dict[str, Any]:
    return {"topic": topic, "payload_b64": "eA=="}
