"""Instruction profiles: what they may say, and that a mistake in one is told by the name of its field."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from asyncgate.extras.ai_worker.command import Discreet
from asyncgate.extras.ai_worker.profile import ProfileError, Secrets, convert_profile, load_profile
from asyncgate.extras.ai_worker.talk import count_json_bytes, shrink_messages
from asyncgate.extras.ai_worker.tools import McpServer, Tool, callable_name, make_tool_names

ENDPOINT = "https://models.example/v1"
GOOD: dict[str, Any] = {"instructions": "Count.", "model": "m", "endpoint": ENDPOINT, "types": ["count"]}
PROGRAM = {"command": ["counter"], "tools": ["*"]}


def with_server(**server: Any) -> dict[str, Any]:
    return {"servers": {"sums": server}}


@pytest.mark.parametrize(("fields", "tells"), [
    ({"model": None}, "model: Expected `str`"),
    ({"colour": "red"}, "colour: is not a field of a profile"),
    ({"instructions": ""}, "instructions: Expected `str` of length >= 1"),
    ({"types": []}, "types: Expected `array` of length >= 1"),
    ({"types": ["count", 3]}, "types[1]: Expected `str`"),
    ({"name": "no spaces"}, "name: Expected `str` matching regex"),
    ({"endpoint": "models.example"}, "'models.example' is not an http or https URL"),
    ({"endpoint": "https://key@models.example/v1"}, "no user, query or fragment"),
    ({"endpoint": "https://models.example/v1?key=1"}, "no user, query or fragment"),
    ({"endpoint": "http://models.example/v1", "api_key_env": "KEY"}, "plain http would show the key"),
    ({"parameters": {"model": "another"}}, "parameters: 'model' is set by the worker itself"),
    ({"limits": {"steps": 0}}, "limits.steps: Expected `int` >= 1"),
    ({"limits": {"seconds": "long"}}, "limits.seconds: Expected `float`"),
    ({"limits": {"stepz": 1}}, "limits.stepz: is not a field of a profile"),
    ({"servers": ["sums"]}, "servers: must be a mapping"),
    ({"servers": {"my sums": PROGRAM}}, "servers: the name 'my sums': Expected `str` matching"),
    (with_server(command=["counter"]), "servers.sums.tools: is required"),
    (with_server(command=["counter"], tools=[]), "servers.sums.tools: Expected `array` of length >= 1"),
    (with_server(tools=["*"]), "servers.sums: give either command"),
    (with_server(**PROGRAM, url="https://tools.example"), "servers.sums: give either command"),
    (with_server(tools=["*"], url="tools.example"), "servers.sums: 'tools.example' is not an http"),
    (with_server(tools=["*"], url="https://tools.example", env={"A": "b"}), "servers.sums: cwd, env and secrets are"),
    (with_server(**PROGRAM, token_env="TOKEN"), "servers.sums: token_env is for a server with a url"),
    (with_server(tools=["*"], url="http://tools.example", token_env="TOKEN"), "servers.sums: plain http would show"),
])
def test_a_mistake_is_told_by_the_name_of_its_field(fields: dict[str, Any], tells: str) -> None:
    with pytest.raises(ProfileError) as wrong:
        convert_profile({**GOOD, **fields})

    assert str(wrong.value).startswith(tells) or tells in str(wrong.value)
    assert "$" not in str(wrong.value).partition("matching")[0]


@pytest.mark.parametrize("missing", list(GOOD))
def test_what_a_profile_needs_is_asked_for(missing: str) -> None:
    with pytest.raises(ProfileError, match=f"^{missing}: is required$"):
        convert_profile({name: value for name, value in GOOD.items() if name != missing})


def test_a_file_gives_its_name_to_the_profile_and_to_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "The Counter.yaml"
    path.write_text(f"instructions: |\n  Count.\n  Twice.\nmodel: m\nendpoint: {ENDPOINT}\ntypes: [count]\n")

    assert load_profile(str(path)).name == "The-Counter"
    path.write_text(path.read_text() + "limits:\n  tokens: many\n")
    with pytest.raises(ProfileError, match=r"^limits\.tokens: Expected `int`, got `str` \(file .*Counter\.yaml\)$"):
        load_profile(str(path))


@pytest.mark.parametrize(("text", "tells"), [
    ("- a list", "must be a mapping"), ("model: a\nmodel: b", "'model' is set twice"), ("model: [", "line 2")])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, tells: str) -> None:
    (tmp_path / "p.yaml").write_text(f"{text}\n")

    with pytest.raises(ProfileError, match=tells):
        load_profile(str(tmp_path / "p.yaml"))
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(str(tmp_path / "none.yaml"))


def test_secrets_come_from_the_environment_or_from_files(tmp_path: Path) -> None:
    profile = convert_profile({**GOOD, "api_key_env": "KEY", **with_server(**PROGRAM, secrets=["TOKEN"])})
    (tmp_path / "token").write_text("from-a-file\n")
    path = str(tmp_path / "token")

    secrets = Secrets(profile, {"KEY": "from-the-environment", "TOKEN_FILE": path})

    assert (secrets["KEY"], secrets["TOKEN"]) == ("from-the-environment", "from-a-file")
    for environ, tells in [
        ({"TOKEN_FILE": path}, "api_key_env: neither KEY nor KEY_FILE is set"),
        ({"KEY": "long-enough", "KEY_FILE": path, "TOKEN": "long-enough"}, "api_key_env: KEY and KEY_FILE are both"),
        ({"KEY": "long-enough", "TOKEN": "short"}, "servers.sums.secrets: TOKEN is shorter than 8"),
        ({"KEY": "long-enough", "TOKEN_FILE": path + "s"}, "servers.sums.secrets: .* cannot be read"),
        ({"KEY": "two\nlines-of-it", "TOKEN": "long-enough"}, "api_key_env: KEY holds characters"),
    ]:
        with pytest.raises(ProfileError, match=tells) as wrong:
            Secrets(profile, environ)
        assert "long-enough" not in str(wrong.value)


def test_a_secret_is_blotted_out_wherever_it_stands() -> None:
    environ = {"KEY": 'a"quoted"key', "ASYNCGATE_API_KEY": "gates-key"}
    secrets = Secrets(convert_profile({**GOOD, "api_key_env": "KEY"}), environ)

    told = secrets.hidden({'a"quoted"key': ["gates-key", {"said": 'it is a\\"quoted\\"key.'}], "count": 5, "no": None})

    assert told == {"[secret]": ["[secret]", {"said": "it is [secret]."}], "count": 5, "no": None}
    assert secrets.hidden("a\0b") == "a\ufffdb"
    assert Secrets(convert_profile(GOOD), {}).hidden("nothing to hide") == "nothing to hide"


def test_the_log_of_a_worker_hides_secrets_whoever_writes(caplog: pytest.LogCaptureFixture) -> None:
    secrets = Secrets(convert_profile({**GOOD, "api_key_env": "KEY"}), {"KEY": "the-key-itself"})
    caplog.handler.addFilter(discreet := Discreet(secrets))
    try:
        raise ValueError("the-key-itself is wrong")
    except ValueError:
        logging.getLogger("mcp.client").exception("it said %r", "the-key-itself")
    finally:
        caplog.handler.removeFilter(discreet)

    assert "it said '[secret]'" in caplog.text
    assert "ValueError: [secret] is wrong" in caplog.text
    assert "the-key-itself" not in caplog.text


def test_every_tool_gets_a_name_that_endpoints_take() -> None:
    profile = convert_profile({**GOOD, "servers": {"a": PROGRAM, "a_b": PROGRAM}})
    secrets = Secrets(profile, {})
    first, second = (McpServer(name, server, secrets, profile.limits) for name, server in profile.servers.items())
    tools = [(first, "b.c"), (second, "c"), (first, "b_c"), (second, "c"), (first, "finish"), (second, "x" * 80),
             (second, "ünï/code")]

    names = list(make_tool_names([(server, Tool(name, "", {})) for server, name in tools], frozenset({"finish"})))

    assert names == ["a_b_c", "a_b_c_2", "a_b_c_3", "a_b_c_4", "a_finish", "x" * 64, "_n__code"]
    assert callable_name("a.b/c d") == "a_b_c_d"


def test_a_conversation_shrinks_by_old_results_first_and_whole_steps_then() -> None:
    def step(number: int, length: int) -> list[dict[str, Any]]:
        calls = [{"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        return [{"role": "assistant", "content": f"step {number}", "tool_calls": calls},
                {"role": "tool", "tool_call_id": str(number), "content": "x" * length}]

    messages = [*step(1, 500), *step(2, 500), *step(3, 500)]
    whole, results, steps = shrink_messages(messages, 10**6), shrink_messages(messages, 1700), shrink_messages(messages,
                                                                                                               500)

    assert whole == messages
    assert [len(message["content"]) > 400 for message in results if message["role"] == "tool"] == [False, True, True]
    assert [message["content"] for message in steps if message["role"] == "assistant"] == [
        "[earlier steps were dropped from the checkpoint] step 2", "step 3"]
    assert count_json_bytes(steps) <= 500
    assert shrink_messages(messages, 10) == []
    assert messages[1]["content"] == "x" * 500
