"""Profiles: an address and a credential together, so that no credential stands on a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asyncgate.clients import http
from asyncgate.clients.testing import Gate
from asyncgate.commands.main import main

KEY = "a-credential-for-the-tests"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ASYNCGATE_URL", "ASYNCGATE_API_KEY", "ASYNCGATE_API_KEY_FILE", "ASYNCGATE_PROFILE",
                 "ASYNCGATE_PLAIN_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "asyncgate" / "profiles.json"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Gate(port=0, api_key=KEY) as gate:
        yield gate.url


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, prog_name="asyncgate")


def test_after_a_login_no_command_needs_an_address_or_a_credential(url: str, home: Path) -> None:
    done = run("login", "--url", url, stdin=f"{KEY}\n")

    assert (done.exit_code, KEY in done.output) == (0, False), done.output
    assert f"{url} accepts you as any principal that a request names, role admin" in done.stdout
    assert run("list-tasks").exit_code == 0
    assert (home.stat().st_mode & 0o777, home.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_login_with_a_wrong_credential_keeps_nothing(url: str, home: Path) -> None:
    done = run("login", "--url", url, stdin="wrong\n")

    assert (done.exit_code, home.exists()) == (3, False)


def test_a_folder_that_cannot_take_the_profiles_is_named(url: str, home: Path) -> None:
    home.parent.write_text("a file, where the folder should be")

    done = run("login", "--url", url, stdin=KEY)

    assert (done.exit_code, KEY in done.output) == (1, False)
    assert done.stderr.startswith(f"Error: cannot use {home.parent}: ")


def test_profiles_are_chosen_by_option_or_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("login", "--url", url, "--profile", "prod", stdin=KEY)
    monkeypatch.setattr(http, "DEFAULT_URL", "http://127.0.0.1:9")      # at 8080 a developer may have a gate

    assert run("list-tasks").exit_code == 7                      # there is no profile default, and no gate at 9
    assert run("list-tasks", "--profile", "prod").exit_code == 0
    monkeypatch.setenv("ASYNCGATE_PROFILE", "prod")
    assert run("list-tasks").exit_code == 0


def test_a_profile_never_lends_its_credential_to_another_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("login", "--url", url, stdin=KEY)

    assert run("list-tasks", "--url", url).exit_code == 3        # no credential was sent
    both = run("list-tasks", "--profile", "default", "--url", url)
    assert (both.exit_code, "give --profile, or --url and --token" in both.stderr) == (2, True)
    monkeypatch.setenv("ASYNCGATE_URL", url)
    assert run("list-tasks").exit_code == 3


def test_an_unknown_profile_is_named_beside_those_there_are(url: str) -> None:
    run("login", "--url", url, "--profile", "prod", stdin=KEY)

    done = run("list-tasks", "--profile", "test")

    assert done.exit_code == 2
    assert "there is no profile 'test' among prod; create it: asyncgate login --profile test" in done.stderr


def test_profiles_are_listed_without_their_credentials_and_forgotten(url: str) -> None:
    run("login", "--url", url, stdin=KEY)

    listed = run("profiles", "--json")

    assert json.loads(listed.stdout) == {"profiles": [{"profile": "default", "url": url, "credential": "yes"}]}
    assert run("logout").exit_code == 0
    assert run("logout").exit_code == 4
    assert run("profiles").stdout.startswith("no profiles")


def test_a_file_of_profiles_that_others_may_read_is_refused(url: str, home: Path) -> None:
    run("login", "--url", url, stdin=KEY)
    home.chmod(0o644)

    done = run("list-tasks")

    assert (done.exit_code, "chmod 600" in done.stderr) == (2, True)


def test_a_credential_does_not_go_over_plain_http_off_this_machine(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    refused = run("list-tasks", "--url", "http://gate.invalid", "--token", KEY)
    login = run("login", "--url", "http://gate.invalid", stdin=KEY)

    assert (refused.exit_code, KEY in refused.output) == (2, False)
    assert "http://gate.invalid is plain HTTP" in refused.stderr
    assert (login.exit_code, home.exists()) == (2, False)
    monkeypatch.setenv("ASYNCGATE_PLAIN_HTTP", "true")
    assert run("list-tasks", "--url", "http://gate.invalid", "--token", KEY).exit_code == 7


@pytest.mark.parametrize("command", [
    ["worker", "echo", "--forget"], ["mcp"], ["archive", "list"], ["receipts", "export", "x"],
    ["bench", "--seconds", "1"], ["scheduler", "--worker-key", KEY, "--agent-key", KEY]], ids=lambda words: words[0])
def test_no_other_command_sends_it_either(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if command[0] == "scheduler" else ["--token", KEY]

    done = run(*command, "--url", "http://gate.invalid", *given)

    assert (done.exit_code, "is plain HTTP" in done.stderr) == (2, True), done.output


def test_a_credential_may_lie_in_a_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")

    assert run("list-tasks", "--url", url, "--token", f"@{tmp_path / 'key'}").exit_code == 0
    missing = run("list-tasks", "--url", url, "--token", f"@{tmp_path / 'none'}")
    assert (missing.exit_code, "No such file" in missing.stderr) == (2, True)
    monkeypatch.setenv("ASYNCGATE_API_KEY_FILE", str(tmp_path / "key"))
    assert run("list-tasks", "--url", url).exit_code == 0
    monkeypatch.setenv("ASYNCGATE_API_KEY", KEY)
    assert run("list-tasks", "--url", url).exit_code == 2
