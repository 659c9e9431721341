"""What somebody expects who finds the repository: links that install, a bundle, the registry's file, and .github."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click
import pytest
import yaml

from asyncgate import __version__
from asyncgate.commands.main import main
from asyncgate.commands.torture import torture
from tests.conftest import Node, tools_of_npm
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
LOCAL = "http://127.0.0.1:8080/mcp/u?tools=delegate"
TOKEN = "a-token-for-tests"


@pytest.mark.parametrize("page", ["README.md", "docs/agents.md"])
def test_a_link_that_installs_names_the_gate_of_this_machine(page: str) -> None:
    links = [urlsplit(link) for link in re.findall(r"\((https://\S+install\S+)\)", (ROOT / page).read_text())]
    told = {str(link.hostname): {name: values[0] for name, values in parse_qs(link.query).items()} for link in links}

    assert set(told) == {"cursor.com", "vscode.dev"}
    assert {query["name"] for query in told.values()} == {"asyncgate"}
    assert json.loads(base64.b64decode(told["cursor.com"]["config"])) == {"url": LOCAL}
    assert json.loads(told["vscode.dev"]["config"]) == {"type": "http", "url": LOCAL}


def test_the_file_for_the_registry_of_mcp_starts_what_there_is() -> None:
    told = json.loads((ROOT / "server.json").read_text())
    [package] = told["packages"]
    [command, *options] = package["packageArguments"]
    program = main.get_command(click.Context(main), command["value"])
    assert program
    known = {option for parameter in program.params for option in parameter.opts}

    assert re.fullmatch(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+", told["name"])
    assert len(told["description"]) <= 100
    assert {told["version"], package["version"]} == {__version__}
    assert {option["name"] for option in options} <= known
    assert [each["name"] for each in package["environmentVariables"]] == ["ASYNCGATE_URL", "ASYNCGATE_API_KEY"]
    # So the registry knows whose package it is.
    assert f"mcp-name: {told['name']} " in (ROOT / "README.md").read_text()


def test_the_bundle_for_claude_desktop_is_valid_and_speaks_for_a_gate(
        live: Any, tools_cache: Path, tmp_path: Path) -> None:
    node = Node(Node.install(tools_of_npm(tools_cache), ("@anthropic-ai/mcpb@2.1.2",)), tmp_path)
    bundle = tmp_path / "asyncgate.mcpb"
    packed = node.run("mcpb", "pack", str(ROOT / "deploy" / "mcpb"), str(bundle))
    assert packed.returncode == 0, packed.stdout + packed.stderr
    zipfile.ZipFile(bundle).extractall(tmp_path / "unpacked")
    manifest = json.loads((tmp_path / "unpacked" / "manifest.json").read_text())
    given = {"url": live.url, "key": TOKEN, "agent": "ada"}
    environment = {name: given[re.fullmatch(r"\$\{user_config\.(\w+)}", value)[1]]   # type: ignore[index]
                   for name, value in manifest["server"]["mcp_config"]["env"].items()}
    asked: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {},
                                                     "clientInfo": {"name": "desktop", "version": "1"}}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "asyncgate_create_task",
                                                     "arguments": {"type": "echo", "payload": "é"}}}]

    with subprocess.Popen(["node", "server.mjs"], cwd=tmp_path / "unpacked", env={**node.environment, **environment},
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        answers = []
        for message in asked:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
            if "id" in message:
                answers.append(json.loads(server.stdout.readline()))
        server.stdin.close()
        assert server.wait(PATIENCE_SECONDS) == 0

    assert manifest["version"] == __version__
    assert set(manifest["user_config"]) == set(given)
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[0]["result"]["serverInfo"]["name"]
    assert "queued" in json.dumps(answers[1]["result"])


def jobs(name: str) -> dict[str, Any]:
    """The jobs of a workflow."""
    told: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / name).read_text())["jobs"]
    return told


def test_a_request_is_tried_by_what_the_readme_runs() -> None:
    [job] = jobs("ci.yml").values()
    oldest, newest = job["strategy"]["matrix"]["python"]

    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert f"Python {oldest} to {newest}" in (ROOT / "README.md").read_text()


def test_each_night_runs_what_the_command_understands() -> None:
    runs = jobs("nightly.yml")["torture"]["strategy"]["matrix"]["run"]

    for run in runs:
        torture.make_context("torture", [*run.split(), "--report", "evidence"])
    assert "--simulate 1000000" in runs


def test_a_release_has_everything_and_needs_no_stored_token() -> None:
    text, released = (GITHUB / "workflows" / "release.yml").read_text(), jobs("release.yml")

    assert set(released) == {"build", "pypi", "npm", "image", "release"}
    assert re.findall(r"secrets\.(\w+)", text) == ["GITHUB_TOKEN"]
    assert all(released[name]["permissions"]["id-token"] == "write" for name in ("build", "pypi", "npm", "image"))
    for made in (".ci/run", "python -m build", "npm pack", "mcpb@2.1.2 pack", "attest-build-provenance"):
        assert made in text
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_no_step_holds_the_token_of_the_checkout() -> None:
    for name in ("ci.yml", "nightly.yml", "release.yml"):
        steps = [step for job in jobs(name).values() for step in job["steps"]
                 if "actions/checkout" in step.get("uses", "")]
        assert steps
        assert all(step["with"]["persist-credentials"] is False for step in steps)


@pytest.mark.parametrize("name", ["bug.yml", "wish.yml"])
def test_a_form_asks_for_what_it_says(name: str) -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / name).read_text())

    assert {"name", "description", "labels", "body"} == set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields) >= 3
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
