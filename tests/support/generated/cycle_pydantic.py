"""The whole cycle with a client that openapi-generator made for Python: argv is the folder, the gate and its token."""

import sys
from importlib import import_module

folder, url, token = sys.argv[1:]
sys.path.insert(0, folder)
made = import_module("made")
client = made.ApiClient(made.Configuration(host=url, access_token=token))
tasks, leases, receipts = made.TasksApi(client), made.LeasesApi(client), made.ReceiptsAndObligationsApi(client)

new = tasks.create_task(made.CreateTask(
    type="made", payload={"n": [1, {"a": None}]}, agent_id="ada", result_delivery="inline",
    requirements=made.Requirements(capabilities=["gpu"])))
(offer,) = leases.lease_next(made.LeaseNext(worker_id="w1", capabilities=["gpu"], accept_types=["made"])).tasks
assert (offer.task_id, offer.payload) == (new.task_id, {"n": [1, {"a": None}]})
held = {"worker_id": "w1", "lease_id": offer.lease_id}
leases.start_task(offer.task_id, made.StartTaskBody(**held))
leases.report_progress(offer.task_id, made.ReportProgressBody(**held, progress={"done": 0.5}))
leases.renew_lease(made.RenewLease(**held, task_id=offer.task_id))
leases.complete(offer.task_id, made.CompleteBody(**held, result={"count": 12}, artifacts=[{"uri": "file:///x"}]))
task = tasks.get_task(new.task_id)
assert (task.status, task.result.result, task.obligation_open) == ("succeeded", {"count": 12}, False), task
listed = receipts.list_receipts(task_id=new.task_id).receipts
assert {"task.assigned", "task.completed"} <= {receipt.receipt_type for receipt in listed}
assert receipts.list_open_obligations(agent_id="ada").open_obligations == []
other = tasks.create_task(made.CreateTask(type="made", payload="text", agent_id="ada"))
(offer,) = leases.lease_next(made.LeaseNext(worker_id="w1", accept_types=["made"])).tasks
leases.fail(offer.task_id, made.FailBody(worker_id="w1", lease_id=offer.lease_id, error={"why": "no"}))
assert tasks.get_task(other.task_id).result.error == {"why": "no"}
print("the cycle is whole")
