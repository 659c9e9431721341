"""`asyncgate login-link` prints a link and how long it is good."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from asyncgate.commands.cli import commands
from tests.conftest import TOKEN, Live
from tests.extras.oauth.conftest import write_signing_key


def test_a_link_is_printed_with_its_code_and_its_life(tmp_path: Path, start: object) -> None:
    live: Live = start(f"security.jwt.private_key_path={write_signing_key(tmp_path / 'signing.pem')}",     # type: ignore[operator]
                       "security.oauth.enabled=true", "public_url=http://127.0.0.1:8080")
    at = ["--url", live.url, "--token", TOKEN]

    done = CliRunner().invoke(commands, ["login-link", "ada", "--role", "admin", *at])
    as_json = CliRunner().invoke(commands, ["login-link", "ada", "--json", "--scopes", "tasks:read", *at])
    wrong = CliRunner().invoke(commands, ["login-link", "ada", "--scopes", "everything", *at])

    code = r"[A-Z2-9]{5}(-[A-Z2-9]{5}){3}"
    assert re.fullmatch(rf"http://127\.0\.0\.1:8080/oauth/link\?code=({code})\ncode {code}\n"
                        r"signs in ada as admin, once, within 10 minutes\n", done.output)
    assert json.loads(as_json.output)["role"] == "agent"
    assert wrong.exit_code == 2


def test_a_gate_without_oauth_says_how_to_turn_it_on(live: Live) -> None:
    named = CliRunner().invoke(commands, ["login-link", "--url", live.url, "--token", TOKEN])
    default = CliRunner(env={"ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": TOKEN}).invoke(commands, ["login-link"])

    says = f"Error: OAuth is off at {live.url}, so nobody can sign in; the setting security.oauth.enabled turns it on\n"
    assert [(done.exit_code, done.output) for done in (named, default)] == [(2, says)] * 2
