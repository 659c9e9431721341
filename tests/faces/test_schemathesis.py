"""Schemathesis reads the OpenAPI document and holds a serving gate to it: no 5xx, no answer that is not documented."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test

from asyncgate import __version__
from asyncgate.parts.faces import openapi
from asyncgate.parts.faces.lease_protocol import LEASE_PROTOCOL
from asyncgate.parts.faces.stream import STREAM
from asyncgate.parts.faces.tickets import TICKET
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"
ALWAYS = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
          "response_schema_conformance"]
# Beside a request for each value that a field may have, so many at random as there are rounds: these take longest.
ONE = hypothesis.settings(max_examples=1, deadline=None, derandomize=True, database=None,
                          suppress_health_check=list(hypothesis.HealthCheck))
DOCUMENT = json.loads(openapi.build_document((*OPERATIONS.values(), *LEASE_PROTOCOL, STREAM, TICKET), __version__))
# What a schema cannot say: cursors and confirmations come from the gate, parents exist, a shared token needs a worker's
# name.
BEYOND_SCHEMAS = {"invalid_cursor", "invalid_confirmation", "parents_required", "parent_not_found", "not_locatable"}
# Nor that one field needs or excludes another, an end comes behind its beginning, a kind has no keys, times begin with
# 1970, null is absent where any other JSON is taken, or that an invisible character outside of JavaScript's ranges is
# in no name.
BEYOND_FIELDS = ("no receipt has the type", "endpoint: ", "types: no event has the type",
                 "the gate itself, ",
                 "name delivery_ids or since, not both", "delivery_ids: ", "say tenant for one tenant, or all_tenants",
                 "an exemption needs a reason",
                 "expires_at is before not_before, so the key would never be valid",
                 "a key identifies an agent, a worker, a service or a human;", "this gate has no archive",
                 "this credential stands for everybody",
                 "say what is meant by exactly one of type, worker and whole_tenant",
                 "capabilities belong to a type",
                 "priority belongs to the action prioritize", "create_task needs payload or payload_pointer",
                 "fail: Object missing required field `error`",
                 "report_progress: Object missing required field `progress`",
                 # A redirect URI is judged as a whole; a metadata document that is not pinned has no say in it.
                 "the redirect URI ", "client_id is ", "client_id has ", "client_id must ", "access_days is 5 to 90",
                 "a client with a metadata document has no secret",
                 # People and sessions are named by exactly one of several fields.
                 "send either token_id or access_token", "this credential does not belong to a person",
                 "principal_id is missing: name the principal to export",
                 "wait_tasks takes ids, or parent_task_id",
                 "payload_schema", "result_schema", "the names and keys of a task's limits have")
BEYOND_PATTERNS = ("alone names nobody", ": a request names one principal, and one session of it",
                   "is not an e-mail address in ASCII", "so there is nothing to pin",
                   "is not a time between 1970 and 9999", "has passed; say a later time",
                   "has no limit ", "Expected a name without invisible characters")
NEEDS_MORE = {"POST /v1/receipts", "POST /v1/leases/claim"}
# Each item of a batch is answered by itself, so the whole is 200.
BATCHES = {"POST /v1/import/receipts", "POST /v1/tasks/batch", "POST /v1/tasks/complete-batch",
           "POST /v1/schedules/report"}

# Who asks is said in the same fields of nearly every request, and read in one place.
ASKERS = {"tenant_id", *(f"{who}_{what}" for who in ("principal", "agent", "worker")
                         for what in ("kind", "id", "instance_id"))}
SPELLED_OUT = {"GET /v1/tasks", "POST /v1/tasks", "POST /v1/tasks/{task_id}/cancel", "POST /v1/leases/claim"}


def without_askers(document: Any) -> Any:
    """Return the document without the optional fields of who asks, but for some requests that have all of them.

    They would be half of all fields, with each of their values tried at each operation.
    """
    document = json.loads(json.dumps(document))
    schemas = document["components"]["schemas"]
    ways = {f"{verb.upper()} {path}": way for path, verbs in document["paths"].items() for verb, way in verbs.items()}
    bodies = {label: way["requestBody"]["content"]["application/json"]["schema"].get("$ref", "").rpartition("/")[2]
              for label, way in ways.items() if "requestBody" in way}
    kept = {bodies.get(label) for label in SPELLED_OUT}
    for label, way in ways.items():
        if label not in SPELLED_OUT:
            others = [field for field in way.get("parameters", ())
                      if field["name"] not in ASKERS or field["in"] == "path" or field.get("required")]
            way["parameters"] = others or way.get("parameters", ())     # of nothing no request could be wrong
        if (name := bodies.get(label)) and name not in kept:
            body = schemas[name]
            body["properties"] = {field: schema for field, schema in body["properties"].items()
                                  if field not in ASKERS or field in body.get("required", ())}
    return document


LEAN = without_askers(DOCUMENT)
SHARED = {"Authorization": f"Bearer {TOKEN}"}

Call = Callable[..., Any]


@cache
def described_once(mode: GenerationMode, coverage: bool) -> Any:
    """Return a description for all operations: what it has resolved for one serves the next."""
    schema = described(mode, LEAN if coverage else DOCUMENT)
    schema.config.phases.coverage.enabled = coverage
    return schema


def described(mode: GenerationMode, document: Any = DOCUMENT) -> Any:
    """Return the document, to make requests of it that fit it, or that do not."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.generation.update(modes=[mode], deterministic=True, allow_x00=mode is GenerationMode.NEGATIVE)
    refusing = schema.config.checks.negative_data_rejection
    refusing.expected_statuses = [*refusing.expected_statuses, "413", "431"]     # also for its size
    return schema


# A stream does not end: test_stream.py reads it.
LABELS = [f"{verb.upper()} {path}" for path, verbs in DOCUMENT["paths"].items() for verb in verbs
          if not path.endswith("/stream")]


def made_of(mode: GenerationMode, label: str, test: Callable[[Any], None], *, coverage: bool = True) -> Call:
    """Return a test of one operation over requests that are made up here and now.

    `schema.parametrize()` makes up those of all operations while pytest collects: ten seconds for every process of a
    run, of which one needs them.  Without `coverage` there is no request for each value that a field may have, and
    the fields of who asks are in.
    """
    schema, (verb, path) = described_once(mode, coverage), label.split(" ")
    run: Call = build_operation_test(
        config=schema.config, operation=schema[path][verb], test_func=test, given_kwargs={}, feedback=FeedbackSources())
    return run


@pytest.fixture(scope="module")
def credentials(live_for_all: Any) -> dict[str, dict[str, str]]:
    """Return the headers of an issued key of each role, and of nobody."""
    def issued(role: str) -> dict[str, str]:
        fields = {"name": role, "principal_kind": "service", "principal_id": "tests", "role": role}
        made = requests.post(f"{live_for_all.url}/v1/keys", json=fields, headers=SHARED, timeout=PATIENCE_SECONDS)
        return {"Authorization": f"Bearer {made.json()['api_key']}"}

    return {"nobody": {}} | {role: issued(role) for role in ("agent", "worker", "admin")}


@pytest.fixture(scope="module")
def call(live_for_all: Any) -> Iterator[Call]:
    """Return what carries a request to a serving gate and checks its answer."""
    with requests.Session() as session:
        session.trust_env = False       # nothing is asked of a proxy, and the environment is not read for each request
        def call(case: Any, checks: list[str], credential: dict[str, str] = SHARED) -> Any:
            return case.call_and_validate(base_url=live_for_all.url, session=session, headers=credential,
                                          checks=CHECKS.get_by_names(checks))

        yield call


def test_the_document_under_test_is_the_one_that_is_served(live_for_all: Any) -> None:
    assert requests.get(f"{live_for_all.url}/openapi.json", timeout=PATIENCE_SECONDS).json() == DOCUMENT


@each("label", LABELS)
def test_a_request_that_fits_the_document_is_carried_out_or_refused_as_documented(
        label: str, call: Call, rounds: int) -> None:
    @hypothesis.settings(ONE, max_examples=rounds)
    def test(case: Any) -> None:
        answer = call(case, ALWAYS)

        if answer.status_code == 400 and label not in NEEDS_MORE:
            body = answer.json()
            # JSON Schema takes 1.0 for an integer, the gate does not.
            told = body["message"]
            assert body["error"] in BEYOND_SCHEMAS or "got `float`" in told or told.startswith(BEYOND_FIELDS) or any(
                text in told for text in BEYOND_PATTERNS), body

    made_of(GenerationMode.POSITIVE, label, test)()


@each("label", LABELS)
def test_whoever_asks_is_answered_as_documented(
        label: str, call: Call, credentials: dict[str, dict[str, str]]) -> None:
    @ONE
    def test(case: Any) -> None:
        for who, credential in credentials.items():
            answer = call(case, ALWAYS, credential)
            if who == "nobody" and not case.operation.path.endswith(("health", "ready")):
                assert answer.status_code == 401

    made_of(GenerationMode.POSITIVE, label, test, coverage=False)()


@each("label", LABELS)
def test_a_request_that_does_not_fit_the_document_is_refused_as_documented(
        label: str, call: Call, rounds: int) -> None:
    @hypothesis.settings(ONE, max_examples=rounds)
    def test(case: Any) -> None:
        # In a query, where there is no null, the word stands for it.
        free = "null" in json.dumps(case.query) or label in BATCHES

        call(case, ALWAYS if free else [*ALWAYS, "negative_data_rejection"])

    made_of(GenerationMode.NEGATIVE, label, test)()


def test_an_answer_that_is_not_documented_would_be_noticed(call: Call) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    del document["paths"]["/v1/tasks/{task_id}"]["get"]["responses"]["404"]
    operation = described(GenerationMode.POSITIVE, document)["/v1/tasks/{task_id}"]["GET"]

    with pytest.raises(FailureGroup) as caught:
        call(operation.Case(path_parameters={"task_id": "unknown"}), ALWAYS)

    assert "404" in str(caught.value.exceptions[0])
