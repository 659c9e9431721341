"""An agent on the server of a2a-sdk, as a program: `python a2a_agent.py FOLDER BINDING VERSION PORT [STREAMS]`.

It prints its address, and writes a line to FOLDER/calls for each message that it takes up, and one to FOLDER/answers
for each request.  With `no` its card says that it streams nothing.  The words of a message say what it does: `ask`,
`auth`, `fail`, `reject`, `talk` (a message, no task), `data`, `two` (artifacts), and `slow`, which waits for FOLDER/go.
It answers oddly to the next CancelTask if there is FOLDER/odd.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from a2a.helpers import proto_helpers as make
from a2a.server.agent_execution.agent_executor import AgentExecutor
from a2a.server.request_handlers.default_request_handler_v2 import DefaultRequestHandlerV2
from a2a.server.routes.agent_card_routes import create_agent_card_routes
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.routes.rest_routes import create_rest_routes
from a2a.server.tasks.inmemory_task_store import InMemoryTaskStore
from a2a.server.tasks.task_updater import TaskUpdater
from a2a.types import a2a_pb2 as pb
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FOLDER = Path(sys.argv[1])
KEY = "Bearer s3cret"


def note(name: str, line: str) -> None:
    """Add a line to a file."""
    with (FOLDER / name).open("a") as file:
        file.write(line + "\n")


class Reader(AgentExecutor):
    """Reads pages."""

    async def execute(self, context: Any, event_queue: Any) -> None:
        """Do what the words of the message say."""
        words, asked = context.get_user_input(), context.current_task is not None
        note("calls", f"{context.task_id} {words}")
        if "talk" in words:
            await event_queue.enqueue_event(make.new_text_message("just words", role=pb.ROLE_AGENT))
            return
        if not asked:
            await event_queue.enqueue_event(make.new_task_from_user_message(context.message))
        task = TaskUpdater(event_queue, context.task_id, context.context_id)
        await task.start_work(self.say(task, "reading"))
        if asked:
            return await self.end(task, [make.new_text_part(f"page {words}")])
        match words.split()[0] if words else "data":
            case "ask":
                await task.requires_input(self.say(task, "Which page?"))
            case "auth":
                await task.requires_auth(self.say(task, "Sign in at https://login.example.com"))
            case "fail":
                tries = (FOLDER / "calls").read_text().count("fail")
                await (task.failed(self.say(task, "no paper")) if tries == 1 else self.end(
                    task, [make.new_text_part("second try")]))
            case "reject":
                await task.reject(self.say(task, "not my job"))
            case "slow":
                while not (FOLDER / "go").exists():     # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.02)
                await self.end(task, [make.new_text_part("SLOW")])
            case "data":
                [part] = [part for part in context.message.parts if part.HasField("data")]
                await self.end(task, [part])
            case "two":
                await task.add_artifact([make.new_text_part("1")], name="first")
                await self.end(task, [make.new_text_part("2"), make.new_url_part("https://x.example.com/a.pdf")])
            case _:
                await self.end(task, [make.new_text_part(words.upper())])

    async def end(self, task: TaskUpdater, parts: list[Any]) -> None:
        """Give an artifact, and end."""
        await task.add_artifact(parts)
        await task.complete()

    def say(self, task: TaskUpdater, words: str) -> Any:
        """Return a message."""
        return task.new_agent_message([make.new_text_part(words)])

    async def cancel(self, context: Any, event_queue: Any) -> None:
        """Cancel a task."""
        note("canceled", context.task_id)
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


async def guard(request: Request, call: RequestResponseEndpoint) -> Response:
    """Let in who has the key, and note who has not."""
    if request.url.path.startswith("/a2a") and request.headers.get("authorization") != KEY:
        note("strangers", request.url.path)
        return Response(status_code=401)
    if (FOLDER / "odd").exists() and b"CancelTask" in await request.body():
        (FOLDER / "odd").unlink()
        return JSONResponse({"error": {"code": [], "message": "odd"}})
    answer = await call(request)
    if request.url.path.startswith("/a2a"):
        note("answers", answer.headers.get("content-type", ""))
    return answer


def make_app(base: str, binding: str, version: str, streams: bool) -> Starlette:
    """Return the agent."""
    way = pb.AgentInterface(url=f"{base}/a2a", protocol_binding=binding, protocol_version=version)
    card = pb.AgentCard(name="reader", description="Reads pages.", version="1", supported_interfaces=[way],
                        capabilities=pb.AgentCapabilities(streaming=streams), default_input_modes=["text/plain"],
                        default_output_modes=["text/plain"], skills=[pb.AgentSkill(
                            id="read", name="read", description="Reads pages.", tags=["pages"])])
    handler = DefaultRequestHandlerV2(Reader(), InMemoryTaskStore(), card)
    routes = create_rest_routes(handler, path_prefix="/a2a") if binding == "HTTP+JSON" else create_jsonrpc_routes(
        handler, "/a2a", enable_v0_3_compat=version == "0.3")

    async def elsewhere(request: Request) -> Response:
        return Response(status_code=307, headers={"location": f"{base}/.well-known/agent-card.json"})

    return Starlette(routes=[*create_agent_card_routes(card), *routes, Route("/moved.json", elsewhere)],
                     middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


if __name__ == "__main__":
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[4])))
    listener.listen()       # who reads the address calls at once
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(base, flush=True)
    app = make_app(base, sys.argv[2], sys.argv[3], "no" not in sys.argv[5:])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    asyncio.run(server.serve([listener]))
