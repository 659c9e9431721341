"""Tasks over A2A: what a message becomes, which state is shown when, and what is refused; a worker needs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncgate.parts.model.settings import A2ASettings
from tests.conftest import Serve
from tests.extras.a2a.conftest import AGENT, Agent, said

pytestmark = pytest.mark.anyio


def state(task: dict[str, Any]) -> str:
    """The state of a task, without its prefix."""
    shown: str = task["status"]["state"]
    assert shown.startswith("TASK_STATE_")
    return shown.removeprefix("TASK_STATE_")


def words(message: dict[str, Any]) -> str:
    """The first words of a message."""
    text: str = message["parts"][0]["text"]
    return text


async def test_a_message_is_a_task_of_the_gate_and_its_result_an_artifact(agent: Agent) -> None:
    task = await agent.begin(said("read this", contextId="talk-7", metadata={"page": 3}))
    begun, lease = state(task), await agent.lease()
    working = state(await agent.task(task["id"]))
    await agent.under(lease, "complete", result="it says hello")
    done = await agent.task(task["id"])

    assert (begun, working, state(done)) == ("SUBMITTED", "WORKING", "COMPLETED")
    assert lease["offer"]["payload"] == {
        "text": "read this", "parts": [{"text": "read this"}], "context_id": "talk-7", "message_id": "m-1",
        "metadata": {"page": 3}}
    assert lease["offer"]["created_by"]["instance_id"] == f"a2a:{done['contextId']}" == "a2a:talk-7"
    assert done["artifacts"] == [
        {"artifactId": "result", "parts": [{"text": "it says hello", "mediaType": "text/plain"}]}]
    assert [message["messageId"] for message in done["history"]] == ["m-1"]
    assert "message" not in done["status"]      # said twice, clients show it twice


async def test_a_blocking_message_waits_for_the_end_and_not_for_a_connection(agent: Agent) -> None:
    sending = asyncio.ensure_future(agent.good("SendMessage", {"message": said()}))
    lease = await agent.lease()
    waits = not sending.done()
    await agent.under(lease, "complete", result={"pages": 2})
    task = (await sending)["task"]

    assert (waits, task["id"], state(task)) == (True, lease["task_id"], "COMPLETED")
    assert task["artifacts"][0]["parts"] == [{"data": {"pages": 2}, "mediaType": "application/json"}]


async def test_a_blocking_message_is_answered_as_things_stand_when_its_time_is_over(serve: Serve) -> None:
    agent = Agent(await serve(a2a=A2ASettings(agents=(AGENT,), max_wait_seconds=0.0)))

    task = (await agent.good("SendMessage", {"message": said()}))["task"]

    assert state(task) == "SUBMITTED"


async def test_a_question_is_answered_by_a_message_to_its_task_with_a_receipt(agent: Agent) -> None:
    task = await agent.begin()
    schema = {"type": "object", "properties": {"window": {"type": "string"}}}
    await agent.ask(await agent.lease(), schema=schema)
    asking = await agent.task(task["id"])
    answer = said("tonight", taskId=task["id"], contextId=task["contextId"], messageId="m-2")
    resumed = await agent.begin(answer)
    lease = await agent.lease()
    await agent.under(lease, "complete", result="deployed")
    done = await agent.task(task["id"])
    receipts = (await agent.served.get(f"/v1/receipts?task_id={task['id']}&receipt_type=input.answered"))["receipts"]

    assert (state(asking), words(asking["status"]["message"])) == ("INPUT_REQUIRED", "Deploy?")
    assert asking["status"]["message"]["parts"][1]["data"] == schema
    assert asking["status"]["message"]["metadata"] == {"asyncgate/key": "deploy"}
    assert (resumed["id"], state(resumed)) == (task["id"], "WORKING")
    assert lease["offer"]["inputs"]["deploy"]["content"] == {"window": "tonight"}
    assert [receipt["body"]["action"] for receipt in receipts] == ["accept"]
    assert [message["role"] for message in done["history"]] == ["ROLE_USER", "ROLE_AGENT", "ROLE_USER"]


async def test_a_blocking_message_ends_when_the_task_begins_to_ask(agent: Agent) -> None:
    sending = asyncio.ensure_future(agent.good("SendMessage", {"message": said()}))
    await agent.ask(await agent.lease())

    assert state((await sending)["task"]) == "INPUT_REQUIRED"


@pytest.mark.parametrize(("key", "shown"), [("auth", "AUTH_REQUIRED"), ("auth:github", "AUTH_REQUIRED"),
                                            ("author", "INPUT_REQUIRED")])
async def test_a_question_about_access_is_told_by_its_key(agent: Agent, key: str, shown: str) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease(), key=key)

    assert state(await agent.task(task["id"])) == shown


async def test_a_question_to_somebody_else_is_not_for_the_client_to_answer(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease(), to={"kind": "human", "id": "boss"})
    waiting = await agent.task(task["id"])

    assert (state(waiting), words(waiting["status"]["message"])) == ("WORKING", "waits for human boss: Deploy?")
    assert await agent.refused("SendMessage", {"message": said(taskId=task["id"])}) == (
        -32004, "UNSUPPORTED_OPERATION")


async def test_of_several_questions_the_oldest_is_answered_or_the_one_that_is_named(agent: Agent) -> None:
    task = await agent.begin()
    lease = await agent.lease()
    for key in ("first", "second", "third"):
        await agent.ask(lease, key=key, message=f"{key}?", keep_lease=True)
    await agent.begin(said("c", taskId=task["id"], metadata={"key": "third"}))
    await agent.begin(said("a", taskId=task["id"]))
    again = await agent.begin(said("c", taskId=task["id"], metadata={"key": "third"}))     # its answer was lost
    rows = (await agent.served.get(f"/v1/tasks/{task['id']}/inputs"))["inputs"]
    inputs = {row["key"]: row["content"] for row in rows}

    assert inputs == {"first": {"text": "a"}, "second": None, "third": {"text": "c"}}
    assert words(again["status"]["message"]) == "second?"
    assert await agent.refused("SendMessage", {"message": said("d", taskId=task["id"], metadata={"key": "third"})}) == (
        -32004, "UNSUPPORTED_OPERATION")


async def test_an_answer_that_does_not_match_its_schema_is_refused_with_its_place(agent: Agent) -> None:
    task = await agent.begin()
    schema = {"type": "object", "properties": {"window": {"type": "string", "enum": ["now"]}}}
    await agent.ask(await agent.lease(), schema=schema)

    assert await agent.refused("SendMessage", {"message": said("later", taskId=task["id"])}) == (
        -32602, "content.window")


@pytest.mark.parametrize(("error", "shown"), [
    ({"code": "broken", "message": "no paper"}, "FAILED"), ({"code": "rejected", "message": "no paper"}, "REJECTED")])
async def test_a_failure_says_why(agent: Agent, error: dict[str, Any], shown: str) -> None:
    task = await agent.begin()
    await agent.under(await agent.lease(), "fail", error=error)
    failed = await agent.task(task["id"])

    assert (state(failed), words(failed["status"]["message"])) == (shown, "no paper")
    assert failed["history"][-1] == failed["status"]["message"]
    assert "artifacts" not in failed


async def test_what_a_worker_says_of_its_progress_is_the_message_of_the_status(agent: Agent) -> None:
    task = await agent.begin()
    await agent.under(await agent.lease(), "progress", progress={"message": "page 3 of 9"})

    assert words((await agent.task(task["id"]))["status"]["message"]) == "page 3 of 9"


async def test_a_task_whose_worker_is_lost_does_not_go_back_to_submitted(agent: Agent) -> None:
    task = await agent.begin()
    lease = await agent.lease()
    await agent.served.post("/v1/leases/release", {k: v for k, v in lease.items() if k != "offer"})

    assert state(await agent.task(task["id"])) == "WORKING"


RESULTS: list[tuple[Any, list[Any]]] = [
    (None, [{"text": "", "mediaType": "text/plain"}]), ("yes", [{"text": "yes", "mediaType": "text/plain"}]),
    ([1, 2], [{"data": [1, 2], "mediaType": "application/json"}]),
    ({"parts": [{"text": "a"}, {"raw": "aGk=", "mediaType": "image/png"}]},
     [{"text": "a"}, {"raw": "aGk=", "mediaType": "image/png"}]),
    ({"parts": [{"raw": "no base64!"}]},
     [{"data": {"parts": [{"raw": "no base64!"}]}, "mediaType": "application/json"}]),
    ({"parts": [{"text": "a", "url": "b"}]},
     [{"data": {"parts": [{"text": "a", "url": "b"}]}, "mediaType": "application/json"}])]


@pytest.mark.parametrize(("result", "parts"), RESULTS)
async def test_any_result_is_at_least_one_artifact(agent: Agent, result: Any, parts: list[Any]) -> None:
    task = await agent.begin()
    await agent.under(await agent.lease(), "complete", result=result)

    assert [artifact["parts"] for artifact in (await agent.task(task["id"]))["artifacts"]] == [parts]


async def test_results_that_are_elsewhere_are_parts_with_their_addresses(agent: Agent) -> None:
    task = await agent.begin()
    where = [{"type": "s3", "url": "https://files.example.com/a.pdf", "mime": "application/pdf"}]
    await agent.under(await agent.lease(), "complete", result="see there", artifacts=where)
    artifacts = (await agent.task(task["id"]))["artifacts"]

    assert [artifact["artifactId"] for artifact in artifacts] == ["result", "result-1"]
    assert artifacts[1]["parts"] == [{"url": where[0]["url"], "mediaType": "application/pdf"}]


async def test_a_task_is_canceled_once_also_while_it_asks(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease())
    canceled = await agent.good("CancelTask", {"id": task["id"]})
    owed = (await agent.served.get("/v1/obligations/open?principal_kind=agent&principal_id=a2a"))["open_obligations"]

    assert (state(canceled), owed) == ("CANCELED", [])
    assert await agent.refused("CancelTask", {"id": task["id"]}) == (-32002, "TASK_NOT_CANCELABLE")


async def test_messages_to_tasks_that_ask_nothing_are_refused(agent: Agent) -> None:
    task = await agent.begin()
    running = await agent.refused("SendMessage", {"message": said(taskId=task["id"])})
    await agent.ask(await agent.lease())
    elsewhere = await agent.refused("SendMessage", {"message": said(taskId=task["id"], contextId="another")})
    await agent.good("CancelTask", {"id": task["id"]})
    ended = await agent.refused("SendMessage", {"message": said(taskId=task["id"])})

    assert (running, elsewhere, ended) == (
        (-32004, "UNSUPPORTED_OPERATION"), (-32602, "message.contextId"), (-32004, "UNSUPPORTED_OPERATION"))


async def test_one_key_is_one_message_whatever_its_id(agent: Agent) -> None:
    keyed = [("idempotency-key", "order-7")]
    first, again = [await agent.begin(said("do it", messageId=id), headers=keyed) for id in ("m-1", "m-2")]
    other = await agent.refused("SendMessage", {"message": said("do something else")}, headers=keyed)

    assert (again["id"], again["contextId"]) == (first["id"], first["contextId"])
    assert other == (-32015, "IDEMPOTENCY_CONFLICT")
    assert len((await agent.served.get("/v1/tasks"))["tasks"]) == 1


async def test_without_a_key_the_same_message_is_another_task_unless_the_settings_say_otherwise(serve: Serve) -> None:
    plain = Agent(await serve(a2a=A2ASettings(agents=(AGENT,))))
    first, second = [await plain.begin(said()) for _ in range(2)]

    assert first["id"] != second["id"]


async def test_a_message_id_counts_as_a_key_if_the_settings_say_so(serve: Serve) -> None:
    agent = Agent(await serve(a2a=A2ASettings(agents=(AGENT,), deduplicate_messages=True)))
    first, again = [await agent.begin(said(contextId="talk")) for _ in range(2)]

    assert first["id"] == again["id"]
    assert await agent.refused("SendMessage", {"message": said("other", contextId="talk")}) == (
        -32015, "IDEMPOTENCY_CONFLICT")


async def test_one_key_is_one_answer_also_when_the_next_question_is_open(agent: Agent) -> None:
    task = await agent.begin()
    lease = await agent.lease()
    for key in ("first", "second"):
        await agent.ask(lease, key=key, message=f"{key}?", keep_lease=True)
    keyed = [("idempotency-key", "answer-1")]
    answered, again = [await agent.begin(said("yes", taskId=task["id"], messageId=id), headers=keyed)
                       for id in ("m-2", "m-3")]
    other = await agent.refused("SendMessage", {"message": said("no", taskId=task["id"])}, headers=keyed)
    elsewhere = await agent.refused("SendMessage", {
        "message": said("yes", taskId=task["id"], metadata={"key": "second"})}, headers=keyed)
    rows = (await agent.served.get(f"/v1/tasks/{task['id']}/inputs"))["inputs"]

    assert words(answered["status"]["message"]) == words(again["status"]["message"]) == "second?"
    assert {row["key"]: row["content"] for row in rows} == {"first": {"text": "yes"}, "second": None}
    assert other == elsewhere == (-32015, "IDEMPOTENCY_CONFLICT")


async def test_what_was_declined_is_told_in_the_history(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease())
    declined = await agent.begin(said("never", taskId=task["id"], metadata={"action": "decline"}))

    assert words(declined["history"][-1]) == "decline"


async def test_a_question_that_was_not_asked_is_named(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease())
    answer = await agent.rpc("SendMessage", {"message": said(taskId=task["id"], metadata={"key": "other"})})

    assert "is INPUT_REQUIRED and has not asked other" in answer.json()["error"]["message"]


async def test_of_eight_answers_at_once_one_counts(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease())
    answers = await asyncio.gather(*[agent.rpc("SendMessage", {
        "message": said(f"answer {n}", taskId=task["id"]), "configuration": {"returnImmediately": True}})
        for n in range(8)])

    assert sorted(answer.json().get("error", {}).get("code", 0) for answer in answers) == [-32004] * 7 + [0]


async def test_who_looks_after_the_gate_sees_who_came_over_a2a_and_in_which_context(agent: Agent) -> None:
    task = await agent.begin(said(contextId="talk-7"))
    made = await agent.served.post("/v1/tasks", {"type": "other", "payload": None, "agent_id": "ada"})
    ours, others = [(await agent.served.call("GET", f"/v1/tasks/{id}/explain")).json()["origin"]
                    for id in (task["id"], made["task_id"])]

    assert (ours, others) == ("agent a2a, over A2A in the context talk-7", "agent ada")


async def test_lists_are_by_the_last_change_and_narrowed_as_asked(agent: Agent) -> None:
    tasks = [await agent.begin(said(contextId=context)) for context in ("a", "b", "a")]
    await agent.good("CancelTask", {"id": tasks[0]["id"]})
    everything = await agent.good("ListTasks")
    of_a = await agent.good("ListTasks", {"contextId": "a"})
    open_ones = await agent.good("ListTasks", {"status": "TASK_STATE_SUBMITTED", "historyLength": 0})
    first = await agent.good("ListTasks", {"pageSize": 2})
    second = await agent.good("ListTasks", {"pageSize": 2, "pageToken": first["nextPageToken"]})
    late = await agent.good("ListTasks", {"statusTimestampAfter": "2199-01-01T00:00:00Z"})

    def ids(page: dict[str, Any]) -> list[str]:
        return [task["id"] for task in page["tasks"]]
    assert ids(everything) == [tasks[0]["id"], tasks[2]["id"], tasks[1]["id"]]
    assert (everything["totalSize"], everything["nextPageToken"]) == (3, "")
    assert ids(of_a) == [tasks[0]["id"], tasks[2]["id"]]
    assert ids(open_ones) == [tasks[2]["id"], tasks[1]["id"]]
    assert not any("history" in task or "artifacts" in task for task in open_ones["tasks"])
    assert (ids(first) + ids(second), second["nextPageToken"]) == (ids(everything), "")
    assert (late["tasks"], late["totalSize"]) == ([], 0)


async def test_a_list_has_the_artifacts_that_the_task_has(agent: Agent) -> None:
    task = await agent.begin()
    lease = await agent.lease()
    given = {"parts": [{"text": "p"}], "artifactId": "a", "append": False}
    await agent.under(lease, "output", chunks=["page 1", given])
    working = await agent.good("ListTasks", {"includeArtifacts": True})
    await agent.under(lease, "complete", result=None)
    ended = await agent.good("ListTasks", {"includeArtifacts": True})

    assert [artifact["artifactId"] for artifact in working["tasks"][0]["artifacts"]] == ["output", "a"]
    assert ended["tasks"] == [await agent.task(task["id"])]


async def test_the_client_says_how_much_of_the_history_it_wants(agent: Agent) -> None:
    task = await agent.begin()
    await agent.ask(await agent.lease())
    await agent.begin(said("yes", taskId=task["id"]))
    lengths = [len((await agent.good("GetTask", {"id": task["id"], **how})).get("history", []))
               for how in ({}, {"historyLength": 0}, {"historyLength": 2}, {"history_length": 99})]

    assert lengths == [3, 0, 2, 3]
    assert await agent.refused("GetTask", {"id": task["id"], "historyLength": -1}) == (-32602, "historyLength")
