"""Dockerfile and fly.toml: they name real settings, agree with each other and hold the values of spec 19.8."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from click.testing import CliRunner

import asyncgate
from asyncgate.parts.model.connection import is_https_by_proxy
from asyncgate.parts.model.settings import Settings, list_settings, load_settings

ROOT = Path(__file__).parents[1]

# The time that a stop may take (exit 0 within 5 s of SIGTERM).
SHUTDOWN_SECONDS = 5


@pytest.fixture(scope="module")
def fly() -> dict[str, Any]:
    return tomllib.loads((ROOT / "fly.toml").read_text())


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """The instructions of the Dockerfile, one list for each FROM."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    blocks: list[list[tuple[str, str]]] = []
    for word, rest in lines:
        if word == "FROM":
            blocks.append([])
        blocks[-1].append((word, " ".join(rest.split())))
    return blocks


@pytest.fixture(scope="module")
def image(stages: list[list[tuple[str, str]]]) -> dict[str, str]:
    """The last stage, which is what runs: each instruction's last value."""
    return dict(stages[-1])


@pytest.fixture(scope="module")
def environment(image: dict[str, str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in image["ENV"].split())


def settings() -> set[str]:
    return {leaf.environment for leaf in list_settings(Settings)}


def gate_variables(environment: dict[str, str]) -> set[str]:
    return {name for name in environment if name.startswith("ASYNCGATE_")}


def probe_of(image: dict[str, str]) -> str:
    """The address that the image's health check asks."""
    code = json.loads(image["HEALTHCHECK"].split("CMD ", 1)[1])[2]
    return str(code.split("'")[1])


def test_every_variable_of_both_files_is_a_setting(fly: dict[str, Any], environment: dict[str, str]) -> None:
    named = gate_variables(environment) | set(fly["env"])

    assert named
    assert named <= settings()


def test_fly_has_the_values_of_spec_19_8(fly: dict[str, Any]) -> None:
    assert {name: value for name, value in fly["env"].items()
            if name != "ASYNCGATE_TRUSTED_PROXIES" and "RATE_LIMITING" not in name} == {
        "ASYNCGATE_DEFAULT_LEASE_TTL_SECONDS": "120",
        "ASYNCGATE_LEASE_SWEEP_INTERVAL_SECONDS": "5",
        "ASYNCGATE_DEFAULT_MAX_ATTEMPTS": "2",
        "ASYNCGATE_DEFAULT_RETRY_BACKOFF_SECONDS": "15",
        "ASYNCGATE_DEFAULT_BOOTSTRAP_MAX_ITEMS": "50",
    }


def test_fly_enforces_limits(fly: dict[str, Any]) -> None:
    """Spec 21.4: a gate that the whole world can reach."""
    limiting = load_settings(environ=fly["env"]).settings.security.rate_limiting

    assert (limiting.enabled, limiting.default_tier) == (True, "paid")


def test_the_gate_believes_the_proxy_that_ends_tls_and_not_its_neighbours(fly: dict[str, Any]) -> None:
    settings = load_settings(environ={"ASYNCGATE_TRUSTED_PROXIES": fly["env"]["ASYNCGATE_TRUSTED_PROXIES"]})
    headers = [(b"x-forwarded-proto", b"https")]

    def strict(peer: str) -> bool:
        return is_https_by_proxy({"client": (peer, 1), "headers": headers}, settings.settings.trusted_proxies)

    assert strict("172.16.3.162")
    assert not strict("fdaa:0:1:a7b::2")        # another app of the organisation
    assert not strict("203.0.113.9")


def test_the_gate_accepts_what_the_deployment_sets(fly: dict[str, Any], environment: dict[str, str]) -> None:
    variables = fly["env"] | {name: environment[name] for name in gate_variables(environment)}

    result = CliRunner().invoke(asyncgate.main, ["config"], env=variables)

    assert result.exit_code == 0, result.output


def test_the_image_starts_the_gate_with_options_it_has(image: dict[str, str]) -> None:
    assert json.loads(image["ENTRYPOINT"]) == ["asyncgate"]
    name, *arguments = json.loads(image["CMD"])

    command = asyncgate.main.commands[name]

    context = command.make_context(name, list(arguments), resilient_parsing=True)
    assert isinstance(command, click.Command)
    assert {context.params["host"], context.params["port"]} == {"0.0.0.0", 8080}


def test_all_ports_agree(fly: dict[str, Any], image: dict[str, str]) -> None:
    arguments = json.loads(image["CMD"])
    served = int(arguments[arguments.index("--port") + 1])

    assert {int(image["EXPOSE"]), fly["http_service"]["internal_port"], urlsplit(probe_of(image)).port} == {served}


def test_the_database_lies_on_the_volume(
    fly: dict[str, Any], image: dict[str, str], environment: dict[str, str]
) -> None:
    database = environment["ASYNCGATE_DATABASE_URL"].removeprefix("sqlite:///")

    assert Path(database).parent == Path(image["VOLUME"]) == Path(fly["mounts"]["destination"])
    assert Path(database).is_absolute()


def test_both_health_checks_ask_a_path_that_the_gate_serves(fly: dict[str, Any], image: dict[str, str]) -> None:
    asked = {check["path"] for check in fly["http_service"]["checks"]} | {urlsplit(probe_of(image)).path}

    assert asked == {"/health"}
    assert {check["method"] for check in fly["http_service"]["checks"]} == {"GET"}


def test_the_gate_does_not_run_as_root(stages: list[list[tuple[str, str]]], image: dict[str, str]) -> None:
    user, group = image["USER"].split(":")
    prepared = next(rest for word, rest in stages[-1] if word == "RUN")

    assert int(user) > 0
    assert f"--uid {user}" in prepared
    assert f"--gid {group}" in prepared
    assert f"--owner={user} --group={group}" in prepared


def test_a_new_volume_belongs_to_the_user_that_writes_it(stages: list[list[tuple[str, str]]]) -> None:
    """Docker gives a new volume the owner of the image's folder, but only of what was done before VOLUME."""
    order = [word for word, _ in stages[-1]]

    assert order.index("RUN") < order.index("VOLUME")


def test_neither_file_holds_a_secret(fly: dict[str, Any], environment: dict[str, str]) -> None:
    named = [*environment, *fly["env"]]

    assert [name for name in named if any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))] == []
    assert urlsplit(environment["ASYNCGATE_DATABASE_URL"]).password is None


def test_fly_keeps_exactly_one_machine_up(fly: dict[str, Any]) -> None:
    service = fly["http_service"]

    assert service["auto_stop_machines"] == "off"
    assert service["min_machines_running"] == 1
    assert service["force_https"] is True
    assert fly["deploy"]["strategy"] == "immediate"


def test_fly_waits_longer_than_a_graceful_stop_takes(fly: dict[str, Any]) -> None:
    assert fly["kill_signal"] == "SIGTERM"
    assert int(fly["kill_timeout"].removesuffix("s")) > SHUTDOWN_SECONDS


def test_the_build_sees_what_the_image_copies_and_nothing_else(stages: list[list[tuple[str, str]]]) -> None:
    copies = [rest.split()[:-1] for word, rest in stages[0] if word == "COPY"]
    rules = (ROOT / ".dockerignore").read_text().splitlines()

    assert rules[1] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == {name for names in copies for name in names}
