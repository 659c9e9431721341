"""The OpenAPI document says what the gate does: every way, every field, every refusal, and examples that hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

import asyncgate
from asyncgate import Operation, __version__
from asyncgate.parts.faces import openapi
from asyncgate.parts.faces.lease_protocol import LEASE_PROTOCOL
from asyncgate.parts.faces.stream import STREAM
from asyncgate.parts.faces.tickets import TICKET
from asyncgate.parts.model import identities
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.wire import Name
from tests.support.each import each

OPERATIONS = asyncgate.OPERATIONS | {op.name: op for op in (*LEASE_PROTOCOL, STREAM, TICKET)}
DOCUMENT = json.loads(openapi.build_document(OPERATIONS.values(), __version__))
WAYS = [(op, verb, path) for op in OPERATIONS.values() for verb, path in op.rest]
KINDS: list[type[GateError]] = [GateError, *GateError.__subclasses__()]
REFUSALS = {kind.code: kind.status for kind in KINDS}


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def said(verb: str, path: str) -> dict[str, Any]:
    """What is said of one method and path, with the refusals that it refers to."""
    told: dict[str, Any] = DOCUMENT["paths"][path][verb.lower()]
    return {**told, "responses": {status: resolve(response) for status, response in told["responses"].items()}}


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    """What a reference leads to."""
    kind, name = node["$ref"].split("/")[2:] if "$ref" in node else ("", "")
    referred: dict[str, Any] = DOCUMENT["components"][kind][name] if name else node
    return referred


def whole(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    """A validator of a schema that points into the document."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]}, validate_formats=True)


def every(node: Any, key: str) -> list[Any]:
    """Everything that stands under a key, anywhere."""
    if isinstance(node, list):
        return [subtree for part in node for subtree in every(part, key)]
    if not isinstance(node, dict):
        return []
    return [subtree for name, part in node.items() for subtree in ([part] if name == key else every(part, key))]


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Every object, anywhere."""
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(part)


def test_every_way_is_described_and_nothing_else() -> None:
    described = {(verb.upper(), path) for path, item in DOCUMENT["paths"].items() for verb in item}

    assert described == {(verb, path) for _, verb, path in WAYS}


def test_no_text_has_a_clause_number_of_the_specification() -> None:
    texts = [text for key in ("description", "summary") for text in every(DOCUMENT, key) if isinstance(text, str)]

    assert [text for text in texts if re.search(r"\b(PH|H)\.\d|[Ss]pec \d|\(\d[\d.]*[,)]", text)] == []


@pytest.mark.parametrize(("text", "expected"), [
    ("It ends (PH.6.2).", "It ends."), ("One (14.1) and two (spec 3, 19.6).", "One and two."),
    ("Gone.  Spec 6.1, 14.1, PH.6.", "Gone."), ("RFC 9110 15.6 says", "RFC 9110 15.6 says"),
    ("up to 30 (seconds)", "up to 30 (seconds)"), ("Version 2.0 of it", "Version 2.0 of it"), ("Old (13).", "Old.")])
def test_a_text_without_clauses_says_the_rest(text: str, expected: str) -> None:
    assert remove_clause_numbers(text) == expected


def test_every_way_has_its_own_name_and_the_first_has_the_operation_s() -> None:
    names = [said(verb, path)["operationId"] for _, verb, path in WAYS]

    assert len(set(names)) == len(WAYS)
    assert [said(*op.rest[0])["operationId"] for op in OPERATIONS.values()] == list(OPERATIONS)
    assert said("POST", "/v1/leases/{lease_id}/extend")["operationId"] == "renew_lease_at_leases_extend"


@each("op, verb, path", WAYS)
def test_every_way_tells_what_a_reader_needs(op: Operation, verb: str, path: str) -> None:
    told = said(verb, path)

    assert told["summary"] == remove_clause_numbers(op.summary)
    assert told["description"] == (remove_clause_numbers(op.text.strip()) or remove_clause_numbers(op.summary))
    assert told["x-roles"] == list(op.roles)
    assert set(told["x-scopes"]) <= op.scopes
    assert (told["x-scopes"] == []) == (not op.scopes)
    # Those of an admin are good for everything, so they are named where nothing else will do.
    own = {scope for scope in op.scopes if not scope.startswith("admin:")}
    assert set(told["x-scopes"]) == (own or {f"admin:{'read' if op.kind == 'R' else 'write'}"} & op.scopes)
    assert told["tags"][0] in {tag["name"] for tag in DOCUMENT["tags"]}
    assert (told.get("security") == []) == op.open
    assert {parameter["name"] for parameter in told["parameters"]
            if parameter["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
    assert all(parameter["required"] for parameter in told["parameters"] if parameter["in"] == "path")


@each("op, verb, path", WAYS)
def test_every_field_of_a_request_is_in_the_path_the_query_or_the_body(op: Operation, verb: str, path: str) -> None:
    told = said(verb, path)
    inside = {parameter["name"] for parameter in told["parameters"]}

    if verb != "GET":
        (pointer,) = every(told["requestBody"], "$ref")
        schema = DOCUMENT["components"]["schemas"][pointer.rpartition("/")[2]]
        assert not inside & set(schema["properties"])
        assert {*op.takes.needed} - inside <= set(schema["required"])
        assert told["requestBody"]["required"] == bool(schema["required"])
        inside |= set(schema["properties"])

    assert inside == set(op.takes.__struct_fields__)


@each("name", OPERATIONS)
def test_the_examples_are_requests_and_replies(name: str) -> None:
    op, (asked, answered) = OPERATIONS[name], OPERATIONS[name].takes.example

    ask = op.reader.body(msgspec.json.encode(asked))[0]
    reply = msgspec.json.decode(msgspec.json.encode(answered), type=op.gives)

    identities.check_needed(ask)
    assert set(asked) <= set(op.takes.__struct_fields__)
    known = {field.encode_name for field in msgspec.structs.fields(type(reply))}
    assert set(answered) <= known


def test_every_operation_has_an_example_of_its_own() -> None:
    assert [name for name, op in OPERATIONS.items() if "example" not in vars(op.takes)] == []


@each("op, verb, path", WAYS)
def test_the_examples_in_the_document_fit_their_schemas(op: Operation, verb: str, path: str) -> None:
    told = said(verb, path)
    media = [told["responses"]["200"]["content"][getattr(op.gives, "media", "application/json")]]
    media += [told["requestBody"]["content"]["application/json"]] if verb != "GET" else []

    for content in media:
        whole(content["schema"]).validate(content["example"])
    for parameter in told["parameters"]:
        if "example" in parameter:
            whole(parameter["schema"]).validate(parameter["example"])
    assert all("example" in parameter for parameter in told["parameters"] if parameter["required"])


@each("op, verb, path", WAYS)
def test_the_refusals_named_are_refusals_of_the_gate_under_their_status(op: Operation, verb: str, path: str) -> None:
    for status, response in said(verb, path)["responses"].items():
        for code in every(response, "enum")[0] if status not in ("200", "204") else ():
            assert REFUSALS[code] == int(status) or (status, code) == ("431", "invalid_request")    # the server's own


def test_every_refusal_of_the_gate_is_named_somewhere() -> None:
    named = {code for _, verb, path in WAYS for names in every(said(verb, path)["responses"], "enum") for code in names}

    # No operation answers the first, only a ledger the second.
    assert set(REFUSALS) - named == {"method_not_allowed", "receipt_id_collision"}


def test_a_get_names_no_refusal_that_only_a_body_can_earn() -> None:
    bodily = {"408", "413", "415"}

    refusals = {verb: bodily & set(said(verb, path)["responses"]) for _, verb, path in WAYS}

    assert refusals == {"GET": set(), "POST": bodily}


def test_every_pointer_leads_somewhere_and_every_schema_is_reached() -> None:
    pointers = {pointer.removeprefix("#/components/") for pointer in every(DOCUMENT, "$ref")}

    assert pointers == {f"{kind}/{name}" for kind in ("schemas", "responses") for name in DOCUMENT["components"][kind]}


def test_a_refusal_that_many_operations_have_stands_there_once() -> None:
    shared = DOCUMENT["components"]["responses"]

    assert len({json.dumps(response, sort_keys=True) for response in shared.values()}) == len(shared)
    assert {status for item in DOCUMENT["paths"].values() for told in item.values()
            for status, response in told["responses"].items() if "$ref" not in response} == {"200", "204"}
    assert len(json.dumps(DOCUMENT)) < 5_000 * sum(len(item) for item in DOCUMENT["paths"].values())


def test_an_object_without_named_members_takes_any() -> None:
    """A generator for TypeScript makes `Record<string, never>` of an object that names none and allows none."""
    objects = [node for node in nodes(DOCUMENT) if node.get("type") == "object"]

    assert [node for node in objects if not {"properties", "additionalProperties"} & set(node)] == []
    assert {"type": "object", "additionalProperties": True} in objects


@pytest.mark.parametrize("schema", ["CreateTask", "RunTask"])
def test_a_task_names_its_payload_if_only_as_null(schema: str) -> None:
    assert DOCUMENT["components"]["schemas"][schema]["required"] == ["payload", "type"]


def test_every_schema_is_a_json_schema() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})


def test_generators_of_clients_find_nothing_to_stumble_over() -> None:
    assert None not in every(DOCUMENT["components"]["schemas"], "default")
    assert [kind for kind in every(DOCUMENT, "type") if isinstance(kind, list) and len({*kind} - {"null"}) > 1] == []
    for op in OPERATIONS.values():      # a default makes TypeScript require the field
        request = DOCUMENT["components"]["schemas"].get(op.takes.__name__, {}).get("properties", {})
        assert [name for name, schema in request.items() if "default" in schema] == []
    # A model of the generator's own stands beside these.
    taken = {"Configuration", "Client", "AuthenticatedClient", "ApiClient", "ApiResponse", "Error", "Errors", "Unset"}
    assert not taken & {*DOCUMENT["components"]["schemas"]}


NAMES = ["a", "a b", "é", "名前", "a" * 200]
NO_NAMES = [" a", "", "a" * 201, "a\n", "a\x00", "a\u202eb", "\u200b", "\ufeffa", "a\x85", "a\nb"]


@each("name", NAMES + NO_NAMES)
def test_the_schema_of_a_name_takes_what_the_gate_takes(name: str) -> None:
    try:
        taken = msgspec.convert(name, Name) == name
    except msgspec.ValidationError:
        taken = False

    assert taken == (name in NAMES)
    assert whole({"$ref": "#/components/schemas/Name"}).is_valid(name) == taken


def test_the_pattern_of_a_name_means_the_same_in_ecmascript() -> None:
    pattern = DOCUMENT["components"]["schemas"]["Name"]["pattern"]

    # What Python writes and ECMAScript does not know, or reads otherwise.
    assert not re.search(r"\\[AZzGQELU]|\(\?[P#aiLmsux<(]|\\N|[*+?}]\+", pattern)


@pytest.mark.anyio
async def test_the_document_is_served_to_everybody_and_is_the_one_that_the_command_prints(served: Any) -> None:
    answer = await served.call("GET", "/openapi.json", token=None)

    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.content == openapi.build_document(OPERATIONS.values(), __version__)
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


@pytest.mark.anyio
async def test_the_page_is_served_under_a_policy_that_allows_its_own_script_and_style_only(served: Any) -> None:
    answer = await served.call("GET", "/docs", token=None)

    page, policy = answer.content.decode(), answer.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert [name for name, _ in answer.pairs].count("content-security-policy") == 1
    # Nothing that such a policy would silently stop.
    assert not re.search(r"<script[^>]|<style[^>]|\sstyle=|\son\w+=|javascript:|https?://", page)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_head_has_the_headers_of_get_and_other_methods_are_refused(served: Any, path: str) -> None:
    got, headed = await served.call("GET", path), await served.call("HEAD", path)
    refused = await served.call("POST", path)

    assert headed.content == b""
    assert headed.pairs == got.pairs
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    assert refused.json()["error"] == "method_not_allowed"
    assert refused.json()["message"] == refused.json()["detail"]


def test_the_page_sends_calls_and_says_what_is_required_first(node_for_openapi: Any, live: Any) -> None:
    script = Path(__file__).parents[1].joinpath("support", "docs_page.mjs").read_text(encoding="utf-8")

    ran = node_for_openapi.run("node", "--input-type=module", "-", live.url, "a-token-for-tests", input=script)

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"nobody": 401, "made": 200, "payload": {"n": 1}, "first": "type",
                                      "parameter": "task_id", "clauses": False}
