"""What asking joins to the gate."""

from asyncgate import EVERYONE, Operation, its_task
from asyncgate.extras.asking import counted, rules
from asyncgate.parts.extras import Extra

COMMAND = "asyncgate.extras.asking.command"
EXTRA = Extra(
    beside=counted.watch, families=counted.QUESTION_FAMILIES,
    extensions=lambda engine: [rules.Asking(engine)], commands={
        "inbox": COMMAND, "answer": COMMAND, "permission-prompt": "asyncgate.extras.asking.permission"}, operations=[
    Operation(rules.request_input, "POST /v1/tasks/{task_id}/inputs", "w A", "tasks:lease", "W", its_task,
              idempotent=True),
    Operation(rules.answer_input, "POST /v1/tasks/{task_id}/inputs/answer", EVERYONE, "tasks:write tasks:lease", "W",
              its_task, idempotent=True),
    Operation(rules.list_inputs, "GET /v1/tasks/{task_id}/inputs", EVERYONE, "tasks:read tasks:lease", "R")])
