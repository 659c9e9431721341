"""Resources that MCP hosts read and watch, and prompts that show the state of the caller's work.

    asyncgate://obligations                     the open obligations of the caller
    asyncgate://tasks/{task_id}                 one task's record
    asyncgate://{instance}/tasks/{task_id}/result   the result in a task's record; its completion receipt points here

A subscription covers resources that the caller may read, checked when it subscribes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import ListenHandler, ResourceUpdated, ServerEvent
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from asyncgate import Extension
from asyncgate.parts.faces.mcp.tools import make_refusal_data
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import JsonObject, encode_json

if TYPE_CHECKING:
    from asyncgate import Caller, Engine, News, Work
    from asyncgate.parts.faces.mcp.tasks import Context, Perform

OBLIGATIONS_URI, TASK_URI = "asyncgate://obligations", "asyncgate://tasks/"
URI = re.compile(r"asyncgate://(?:tasks/(?P<task>[^/?#]+)|[^/?#]+/tasks/(?P<result>[^/?#]+)/result)\Z")
NOT_FOUND_BEFORE_2026 = -32002
CREDENTIAL_CHECK_SECONDS = 5.0        # between checks of a subscription's credential
MOST_WATCHED = 100   # resources of one subscription
MOST_SHOWN = 20      # obligations and leases that a prompt lists
RESUME, FORMER_RESUME = "resume_session", "resume_work"     # which is also the operation that ends a pause
_json = msgspec.json.Decoder(JsonObject).decode

TEMPLATES = [
    types.ResourceTemplate(uri_template=TASK_URI + "{task_id}", name="task", title="One task",
                           mime_type="application/json", description="The full record of a task, with its "
                           "result or error once it has ended."),
    types.ResourceTemplate(uri_template="asyncgate://{instance}/tasks/{task_id}/result", name="result",
                           title="The result of a task", mime_type="application/json",
                           description="The result in the record of a completed task.")]
RESOURCES = [types.Resource(uri=OBLIGATIONS_URI, name="obligations", title="What is owed to you",
                            mime_type="application/json", description="Your open obligations, oldest first.")]
PROMPTS = [
    types.Prompt(name=RESUME, title="Resume a session",
                 description="What do I owe, what is owed to me, what is next?", arguments=[
                     types.PromptArgument(name="agent_id", description="your id, if your credential does not name you"),
                     types.PromptArgument(name="worker_id", description="the worker whose leases to list")]),
    types.Prompt(name="delegate", title="Delegate", description="Hand over a piece of work, and get its result.",
                 arguments=[types.PromptArgument(name="goal", description="the work to be done", required=True),
                            types.PromptArgument(name="type", description="the type of task that workers take")])]

DELEGATE = """Hand this over with AsyncGate: {goal}

1. create_task with type {type}, a payload with what a worker needs, instructions, and an idempotency_key made from
   this goal, so that repeating the call creates nothing twice. requirements.capabilities lists the skills that a
   worker needs; result_delivery: inline asks for the result in the task's record.
2. Keep the task_id, or forget it: list_open_obligations finds the task again.
3. get_task with wait_seconds: 30 waits for the end. If it has succeeded and obligation_open is still true, call
   attach_artifacts to say where the result is. cancel_task cancels the work."""


class Library:
    """Answers the SDK's requests for resources and prompts."""

    def __init__(self, perform: Perform, whose: Callable[[Context], tuple[str, wire.Principal]],
                 engine: Callable[[], Engine], most: int, caller: Callable[[Context], Caller]) -> None:
        self.perform, self.whose, self.engine, self.most, self.caller = perform, whose, engine, most, caller
        self.listening: set[ListenHandler] = set()

    def join(self, server: Server[Any]) -> None:
        """Register the handlers with a server."""
        server.add_request_handler("resources/list", types.PaginatedRequestParams, self.resources)
        server.add_request_handler("resources/templates/list", types.PaginatedRequestParams, self.templates)
        server.add_request_handler("resources/read", types.ReadResourceRequestParams, self.read)
        server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, self.listen)
        server.add_request_handler("prompts/list", types.PaginatedRequestParams, self.prompts)
        server.add_request_handler("prompts/get", types.GetPromptRequestParams, self.prompt)

    def close(self) -> None:
        """End every subscription gracefully."""
        for handler in self.listening:
            handler.close()

    # Resources.

    async def resources(self, ctx: Context, params: Any) -> types.ListResourcesResult:
        """List the fixed resources."""
        return types.ListResourcesResult(resources=RESOURCES)

    async def templates(self, ctx: Context, params: Any) -> types.ListResourceTemplatesResult:
        """List the resources that have an id."""
        return types.ListResourceTemplatesResult(resource_templates=TEMPLATES)

    async def read(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        """Read one resource."""
        text = (await self._text(ctx, str(params.uri))).decode()
        return types.ReadResourceResult(contents=[
            types.TextResourceContents(uri=params.uri, mime_type="application/json", text=text)])

    async def _text(self, ctx: Context, uri: str) -> bytes:
        """Return the resource at a URI; raise "not found" if the caller may not read it."""
        named = URI.match(uri)
        try:
            if uri == OBLIGATIONS_URI:
                return await self.perform(ctx, "list_open_obligations", {})
            if named and (task_id := named["task"]):
                return await self.perform(ctx, "get_task", {"task_id": task_id})
            task = _json(await self.perform(ctx, "get_task", {"task_id": named["result"]})) if named else {}
            if (outcome := task.get("result")) is not None:
                return encode_json(outcome["result"])
        except errors.GateError as refusal:
            if refusal.status == 400 or refusal.status >= 500:
                code = types.INVALID_PARAMS if refusal.status == 400 else types.INTERNAL_ERROR
                raise MCPError(code, str(refusal), make_refusal_data(refusal)) from None
        modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        raise MCPError(types.INVALID_PARAMS if modern else NOT_FOUND_BEFORE_2026, f"there is no resource {uri}",
                       {"uri": uri})

    async def listen(self, ctx: Context, params: types.SubscriptionsListenRequestParams) -> Any:
        """Tell a caller about changes of its subscribed resources, until it disconnects."""
        if len(self.listening) >= self.most:
            raise MCPError(types.INTERNAL_ERROR, f"{self.most} subscriptions are open, the limit; try again later")
        uris = {*map(str, params.notifications.resource_subscriptions or ())}
        if len(uris) > MOST_WATCHED:        # each is read, and all of them are one call to the rate limits
            raise MCPError(types.INVALID_PARAMS, f"a subscription covers at most {MOST_WATCHED} resources")
        for uri in uris:
            await self._text(ctx, uri)
        handler = ListenHandler(Feed(self.engine(), *self.whose(ctx)))
        try:
            with self.engine().polls.place(*self.whose(ctx)):
                self.listening.add(handler)
                watch = asyncio.create_task(self._while_good(ctx, handler))
                try:
                    return await handler(ctx, params)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except errors.TooManyWaiting as refusal:
            raise MCPError(types.INTERNAL_ERROR, str(refusal), make_refusal_data(refusal)) from None
        finally:
            self.listening.discard(handler)

    async def _while_good(self, ctx: Context, handler: ListenHandler) -> None:
        """End a subscription when its credential is no longer valid."""
        engine, caller, changed = self.engine(), self.caller(ctx), asyncio.Event()
        credentials = Credentials(changed)
        engine.extend(credentials)
        try:
            while True:
                await engine.check_caller(caller)
                changed.clear()
                with suppress(TimeoutError):        # wait_for may swallow a cancellation before Python 3.12
                    async with asyncio.timeout(CREDENTIAL_CHECK_SECONDS):
                        await changed.wait()
        except errors.GateError:
            handler.close()
        finally:
            engine.withdraw(credentials)

    # Prompts.

    async def prompts(self, ctx: Context, params: Any) -> types.ListPromptsResult:
        """List the prompts."""
        return types.ListPromptsResult(prompts=PROMPTS)

    async def prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        """Return one prompt."""
        given = params.arguments or {}
        if params.name in (RESUME, FORMER_RESUME):
            text = await self._resume(ctx, given)
        elif params.name == "delegate" and given.get("goal"):
            text = DELEGATE.format(goal=given["goal"], type=quote_text(given.get("type") or "of your choice"))
        else:
            raise MCPError(types.INVALID_PARAMS, f"the prompts are {RESUME}, and delegate, which needs a goal")
        return types.GetPromptResult(messages=[
            types.PromptMessage(role="user", content=types.TextContent(type="text", text=text))])

    async def _resume(self, ctx: Context, given: dict[str, str]) -> str:
        """Describe the state of the caller's work, from stored facts only."""
        caller, query = self.caller(ctx), dict(ctx.request.query_params) if ctx.request else {}
        agent = given.get("agent_id") or query.get("principal_id")
        worker = given.get("worker_id") or (agent if query.get("principal_kind") == "worker" else None)
        try:
            if caller.bound or agent:
                owed = await self._owed(ctx, {"agent_id": given["agent_id"]} if given.get("agent_id") else {})
            else:
                owed = await self._owed_to_all(ctx)
            held = await self._held(ctx, {"worker_id": worker} if worker else {}) if caller.bound or worker else [
                "- nothing that is known: this credential names no worker, so say worker_id"]
        except errors.GateError as refusal:
            raise MCPError(types.INVALID_PARAMS, str(refusal), make_refusal_data(refusal)) from None
        return "\n".join(["You are resuming work; this is what AsyncGate has on record.", "", "What you owe:",
                          *(held or ["- nothing"]), "", "What is owed to you:", *(owed or ["- nothing"])])

    async def _owed_to_all(self, ctx: Context) -> list[str]:
        """List what is owed to anybody, for a credential that names nobody."""
        page = _json(await self.perform(ctx, "list_obligations", {"limit": MOST_SHOWN}))["obligations"]
        lines = ["- this credential names nobody, so this is what is owed to anybody in the tenant; say agent_id for "
                 "what is owed to you"] if page else []
        for owed in page:
            step = await self._describe(ctx, owed["task_id"]) if owed["task_id"] else [
                f"- the schedule {quote_text(owed['schedule_id'])} runs"]
            lines += [f"{line} (owed to {owed['to']['kind']} {quote_text(owed['to']['id'])})" for line in step]
        return lines

    async def _describe(self, ctx: Context, task_id: str) -> list[str]:
        with suppress(errors.GateError):
            return [describe_task(_json(await self.perform(ctx, "get_task", {"task_id": task_id})))]
        return []

    async def _owed(self, ctx: Context, who: JsonObject) -> list[str]:
        answer = _json(await self.perform(ctx, "list_open_obligations", {**who, "limit": MOST_SHOWN}))
        lines = []
        for receipt in answer["open_obligations"]:
            if receipt["receipt_type"] == "task.assigned":
                lines += await self._describe(ctx, receipt["task_id"])
            else:
                lines.append(f"- the schedule {quote_text(receipt['schedule_id'])} runs: emit_receipt schedule.deleted "
                             f"with parents [{quote_text(receipt['receipt_id'])}] ends it")
        more = len(answer["open_obligations"]) == MOST_SHOWN
        return [*lines, *([f"- maybe more: list_open_obligations since_receipt_id {answer['cursor']}"] if more else [])]

    async def _held(self, ctx: Context, who: JsonObject) -> list[str]:
        try:
            leases = _json(await self.perform(ctx, "list_leases", {**who, "resume": False}))["leases"]
        except errors.GateError as refusal:
            if refusal.status == 403:    # agents hold no leases
                return []
            raise
        return [f"- the task {lease['task_id']} of type {quote_text(lease['type'])}, under lease "
                f"{lease['lease_id']} until {lease['expires_at']}: renew_lease every "
                f"{lease['renew_every_seconds']:.0f} s, then complete, fail or release_lease"
                for lease in leases[:MOST_SHOWN]]


class Credentials(Extension):
    """Tells a subscription that a key or a tenant's account has changed."""

    def __init__(self, changed: asyncio.Event) -> None:
        self.changed = changed

    def after_record_change(self, work: Work) -> None:
        """Notify if a batch changed a key or an account."""
        if any(kind in (stored.Key, stored.Account) for kind, _ in work.kept):
            self.changed.set()


class Feed:
    """The changes that concern one caller, in the form that the SDK's subscriptions read."""

    def __init__(self, engine: Engine, tenant_id: str, who: wire.Principal) -> None:
        self.engine, self.tenant_id, self.who = engine, tenant_id, who

    async def publish(self, event: ServerEvent) -> None:
        """Not supported: only commits publish changes."""
        raise NotImplementedError

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Notify the listener of every commit that concerns the caller, until the returned function is called."""
        subscription = Subscription(self.tenant_id, self.who, listener)
        self.engine.extend(subscription)
        return partial(self.engine.withdraw, subscription)


class Subscription(Extension):
    """Notifies one listener of changes for its principal; from other processes, only of tasks that end."""

    def __init__(self, tenant_id: str, who: wire.Principal, listener: Callable[[ServerEvent], None]) -> None:
        self.tenant_id, self.who, self.listener = tenant_id, who, listener

    def after_commit(self, work: Work) -> None:
        """Notify of the tasks that a batch changed, and of the principal's obligations."""
        if work.tenant_id != self.tenant_id:
            return
        for task_id in {*work.added, *work.moved, *work.progressed}:
            self.listener(ResourceUpdated(uri=TASK_URI + task_id))
        if any(owner.same(self.who) for owner in (*work.opened.values(), *work.closed.values())):
            self.listener(ResourceUpdated(uri=OBLIGATIONS_URI))

    def hear_news(self, news: News) -> None:
        """Notify of the tasks that ended in another process."""
        for task_id in news.ended if news.tenant_id == self.tenant_id else ():
            self.listener(ResourceUpdated(uri=TASK_URI + task_id))


def describe_task(task: JsonObject) -> str:
    """Describe a task that is owed to the caller, and the next step."""
    task_id, status = task["task_id"], task["status"]
    step = f"get_task {task_id} with wait_seconds waits for the end, cancel_task cancels it"
    if task["held"]:
        step = "it is on hold: release_hold offers it to workers again, cancel_task cancels it"
    elif status == "succeeded":
        step = "read its result with get_task, then call attach_artifacts with the place of the result to discharge it"
    return f"- the task {task_id} of type {quote_text(task['type'])} is {status}: {step}"


def quote_text(text: str) -> str:
    """Quote foreign text, so that a model does not take it for a part of the prompt."""
    return encode_json(text).decode()
