"""The whole cycle with a client that openapi-python-client made: argv is the folder, the gate and its token."""

import sys
from importlib import import_module
from typing import Any

folder, url, token = sys.argv[1:]
sys.path.insert(0, folder)
client = import_module("made").AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)
models = import_module("made.models")


def call(group: str, name: str, model: str = "", *path: str, **fields: Any) -> Any:
    operation = import_module(f"made.api.{group}.{name}")
    body = {"body": getattr(models, model).from_dict(fields)} if model else fields
    answer = operation.sync(*path, client=client, **body)
    assert answer is not None
    assert not hasattr(answer, "error"), answer
    return answer.to_dict()


def claim(**fields: Any) -> Any:
    (offer,) = call("leases", "lease_next", "LeaseNext", worker_id="w1", accept_types=["made"], **fields)["tasks"]
    return offer


made = call("tasks", "create_task", "CreateTask", type="made", payload={"n": [1, {"a": None}]}, agent_id="ada",
            requirements={"capabilities": ["gpu"], "tags": ["x"]}, result_delivery="inline")
offer = claim(capabilities=["gpu"])
assert (offer["task_id"], offer["payload"]) == (made["task_id"], {"n": [1, {"a": None}]})
held = {"worker_id": "w1", "lease_id": offer["lease_id"]}
call("leases", "start_task", "StartTaskBody", offer["task_id"], **held)
call("leases", "report_progress", "ReportProgressBody", offer["task_id"], **held, progress={"done": 0.5})
call("leases", "renew_lease", "RenewLease", **held, task_id=offer["task_id"])
call("leases", "complete", "CompleteBody", offer["task_id"], **held, result={"count": 12},
     artifacts=[{"type": "file", "uri": "file:///x"}])
task = call("tasks", "get_task", "", made["task_id"])
assert (task["status"], task["result"]["result"]) == ("succeeded", {"count": 12}), task
receipts = call("receipts_and_obligations", "list_receipts", "", task_id=made["task_id"])["receipts"]
assert {"task.assigned", "task.completed"} <= {receipt["receipt_type"] for receipt in receipts}
owed = call("receipts_and_obligations", "list_open_obligations", "", agent_id="ada")
assert owed["open_obligations"] == []
other = call("tasks", "create_task", "CreateTask", type="made", payload="text", agent_id="ada")
offer = claim()
call("leases", "fail", "FailBody", offer["task_id"], worker_id="w1", lease_id=offer["lease_id"], error={"why": "no"})
assert call("tasks", "get_task", "", other["task_id"])["result"]["error"] == {"why": "no"}
print("the cycle is whole")
