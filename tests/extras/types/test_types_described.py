"""Declared types over REST: each has a path of its own, and a document that generators make a typed client of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.faces.test_generated_clients import ended, made_by

pytestmark = pytest.mark.anyio
SCAN = {"type": "object", "properties": {"file": {"type": "string"}, "box": {"$ref": "#/$defs/Box"}},
        "required": ["file"], "$defs": {"Box": {"type": "object", "properties": {"width": {"type": "integer"},
                                                                                "inner": {"$ref": "#/$defs/Box"}}}}}
PAGES = {"type": "object", "properties": {"pages": {"type": "integer"}}, "required": ["pages"]}
PATH = "/v1/types/ocr.scan/run"


@pytest.fixture
async def served(serve: Any) -> Any:
    """Return a gate that waits for nothing."""
    return await serve(max_wait_seconds=0.01)


async def declare(served: Any, type: str = "ocr.scan", **more: Any) -> None:
    await served.post("/v1/types", {"type": type, "worker_id": "w1", "description": "Read a scanned page.", **more})


def resolve(document: Any, schema: Any) -> Any:
    """Return what a reference leads to."""
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


async def test_each_declared_type_has_a_path_with_its_payload_and_its_result(served: Any) -> None:
    await declare(served, payload_schema=SCAN, result_schema=PAGES)
    await declare(served, "mail/send now")

    document = await served.get("/v1/types/openapi.json")

    assert set(document["paths"]) == {PATH, "/v1/types/mail%2Fsend%20now/run", "/v1/tasks/{task_id}",
                                      "/v1/tasks/{task_id}/cancel"}
    run = document["paths"][PATH]["post"]
    ask = resolve(document, run["requestBody"]["content"]["application/json"]["schema"])
    record = resolve(document, run["responses"]["200"]["content"]["application/json"]["schema"])
    outcome = resolve(document, record["properties"]["result"]["anyOf"][0])
    assert (run["operationId"], run["summary"]) == ("run_ocr_scan", "Read a scanned page.")
    assert "type" not in ask["properties"]
    assert ask["required"] == ["payload"]
    assert resolve(document, outcome["properties"]["result"]["anyOf"][0]) == PAGES
    whole = jsonschema_rs.Draft202012Validator({**ask, "components": document["components"]})
    assert whole.is_valid({"payload": {"file": "a", "box": {"inner": {"width": 1}}}, "wait_seconds": 1})
    assert not whole.is_valid({"payload": {"file": "a", "box": {"inner": {"width": "wide"}}}})


@pytest.mark.parametrize("odd", [
    {"properties": {"$ref": {"type": "string"}}}, {"enum": [{"$ref": []}]}, {"default": {"$ref": {}}},
    {"description": "as #/components/schemas/Nothing"}, {"const": "#/components/schemas/Nothing"}])
async def test_no_declared_type_breaks_the_document_of_the_others(served: Any, odd: dict[str, Any]) -> None:
    await declare(served, payload_schema=SCAN)
    await declare(served, "odd", payload_schema=odd, result_schema=odd,
                  description="Takes #/components/schemas/Nothing.")

    document = await served.get("/v1/types/openapi.json")

    assert document["components"]["schemas"]["OddTaskPayload"] == odd
    assert PATH in document["paths"]


async def test_the_path_of_a_type_runs_a_task_of_it_and_holds_it_to_its_schema(served: Any) -> None:
    await declare(served, payload_schema=SCAN)

    record = await served.post(PATH, {"payload": {"file": "a.png"}, "agent_id": "ada"})
    other = await served.post(PATH, {"type": "mail", "payload": {"file": "b.png"}, "agent_id": "ada"})
    empty = await served.call("POST", PATH, {})
    refused = await served.call("POST", PATH, {"payload": {"box": {}}, "agent_id": "ada"})

    assert (record["type"], record["payload"], record["status"]) == ("ocr.scan", {"file": "a.png"}, "queued")
    assert (other["type"], empty.status) == ("ocr.scan", 400)
    assert (refused.status, refused.json()["error"], refused.json()["path"]) == (400, "payload_invalid", "payload.file")


async def test_a_type_with_a_slash_has_its_path_too(served: Any) -> None:
    await declare(served, "mail/send now")

    record = await served.post("/v1/types/mail%2Fsend%20now/run", {"payload": 1, "agent_id": "ada"})
    await served.post("/v1/types/mail%2fsend%20now/remove", {})

    assert record["type"] == "mail/send now"
    assert all("description" not in row for row in (await served.get("/v1/types"))["types"])


async def test_a_credential_is_shown_what_it_may_create_and_nothing_of_other_tenants(served: Any) -> None:
    await declare(served, payload_schema=SCAN)
    await declare(served, "mail")
    limited = await served.post("/v1/keys", {"principal_kind": "agent", "principal_id": "bob", "role": "agent",
                                             "name": "limited", "task_types": ["mail"]})

    document = await served.get("/v1/types/openapi.json", token=limited["api_key"])
    nobody = await served.call("GET", "/v1/types/openapi.json", token=None)
    refused = await served.call("POST", "/v1/types/openapi.json", {})

    assert [path for path in document["paths"] if path.startswith("/v1/types")] == ["/v1/types/mail/run"]
    assert "ocr" not in json.dumps(document).lower()
    assert (nobody.status, refused.status) == (401, 405)


async def test_a_type_is_never_taken_for_a_schema_of_the_gate(served: Any) -> None:
    for type in ("task", "_", "create", "get", "run"):
        await declare(served, type, payload_schema=PAGES, result_schema=PAGES)

    document = await served.get("/v1/types/openapi.json")

    assert {path for path in document["paths"] if path.startswith("/v1/types")} == {
        f"/v1/types/{type}/run" for type in ("task", "_", "create", "get", "run")}
    assert "lease_id" not in document["components"]["schemas"]["TaskRecord"]["required"]
    assert len({item["post"]["operationId"] for path, item in document["paths"].items() if "types" in path}) == 5


async def test_a_generator_makes_a_typed_client_of_it(served: Any, tmp_path: Path, tools_cache: Path) -> None:
    await declare(served, payload_schema=SCAN, result_schema=PAGES)
    described = tmp_path / "types.json"
    described.write_text(json.dumps(await served.get("/v1/types/openapi.json")))
    folder = made_by("openapi-python-client", tools_cache)

    output = ended([sys.executable, folder / "bin" / "openapi-python-client", "generate", "--path", described, "--meta",
                    "none", "--output-path", tmp_path / "made"], env={"PYTHONPATH": str(folder), "HOME": str(tmp_path),
                                                                     "PATH": "/usr/bin:/bin"}, cwd=tmp_path)
    told = ended([sys.executable, "-c", """
from made.models import OcrScanTaskPayload, OcrScanTaskRun
ask = OcrScanTaskRun.from_dict({"payload": {"file": "a.png", "box": {"width": 3}}})
assert isinstance(ask.payload, OcrScanTaskPayload), ask
print(ask.payload.file, ask.payload.box.width)"""], env={"PYTHONPATH": f"{folder}:{tmp_path}"}, cwd=tmp_path)

    assert "WARNING parsing" not in output
    assert told == "a.png 3\n"
