"""`asyncgate inbox` and `asyncgate answer`: see what one is asked, and answer it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from asyncgate.clients import http
from asyncgate.commands import calling, terminal
from asyncgate.commands.profiles import Connection
from asyncgate.commands.verdicts import print_answer

QUESTIONS_PER_CALL = 200
SHOWN = ("task_id", "key", "message", "from", "since")
WHO = click.option("--as", "who", metavar="KIND:ID", help="Whose inbox; for a credential that stands for everybody.")


def read_who(who: str | None) -> dict[str, str]:
    """Return the principal that `--as` names, as a request names it."""
    if who is None:
        return {}
    kind, colon, id = who.partition(":")
    if not (kind and colon and id):
        raise calling.exit_with("--as takes a kind and an id, such as human:boss", calling.EXIT_WRONG)
    return {"principal_kind": kind, "principal_id": id}


def list_questions(gate: http.Http, who: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what somebody is asked, the oldest first."""
    questions, since = list[dict[str, Any]](), dict[str, Any]()
    while True:
        page = gate.call("list_open_obligations", **who, **since, limit=QUESTIONS_PER_CALL)
        questions += [{"task_id": row["task_id"], "from": f"{row['from']['kind']} {row['from']['id']}",
                       "since": row["created_at"], "receipt_id": row["receipt_id"], **read_question(gate, row, who)}
                      for row in page["open_obligations"] if row["receipt_type"] == "input.requested"]
        if len(page["open_obligations"]) < QUESTIONS_PER_CALL:
            return questions
        since = {"since_receipt_id": page["cursor"]}


def read_question(gate: http.Http, receipt: Mapping[str, Any], who: Mapping[str, str]) -> dict[str, Any]:
    """Return what a question asks; its task tells it while a ledger is away that alone has the receipt's body."""
    if receipt["body"] is not None:
        return dict(receipt["body"])
    questions = gate.call("list_inputs", task_id=receipt["task_id"], **who)["inputs"]
    return next((question for question in questions if question["request_receipt_id"] == receipt["receipt_id"]), {})


@click.command()
@WHO
@calling.as_json
@calling.add_gate_options
def inbox(at: Connection, who: str | None, as_json: bool) -> None:
    """Show the questions that wait for your answer, the oldest first."""
    with calling.connect_to_gate(at) as gate:
        questions = list_questions(gate, read_who(who))
    if as_json:
        return print_answer(True, {"questions": questions})
    if not questions:
        return click.echo("nobody waits for an answer of yours")
    terminal.show_table(SHOWN, questions)
    click.echo("answer one: asyncgate answer TASK KEY accept" + (f" --as {shlex.quote(who)}" if who else ""))


@click.command()
@click.argument("task_id", metavar="TASK", type=calling.ID_TYPE)
@click.argument("key")
@click.argument("action", type=click.Choice(["accept", "decline", "cancel"]))
@click.option("--content", metavar="JSON", help="The answer; without it each member of the question's schema is asked "
                                                "for at a terminal.")
@WHO
@calling.as_json
@calling.add_gate_options
def answer(at: Connection, task_id: str, key: str, action: str, content: str | None, who: str | None,
           as_json: bool) -> None:
    """Answer a question: accept it, decline it, or dismiss it without a choice."""
    caller = read_who(who)
    with calling.connect_to_gate(at) as gate:
        value = None if content is None else read_json(content)
        if content is None and action == "accept" and terminal.is_terminal(sys.stdin):
            value = ask_for_content(gate, task_id, key, caller)
        reply = gate.call("answer_input", task_id=task_id, key=key, action=action, content=value, **caller)
    left = f"; {reply['open_inputs']} more to answer" if reply["open_inputs"] else f"; the task is {reply['status']}"
    print_answer(as_json, reply, f"{key}: {action}{left}", f"receipt {reply['receipt_id']}")


def read_json(text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as wrong:
        raise calling.exit_with(f"--content is not JSON: {wrong}; a text needs quotes: '\"yes\"'",
                                calling.EXIT_WRONG) from None


def ask_for_content(gate: http.Http, task_id: str, key: str, caller: Mapping[str, str]) -> Any:
    """Ask for each member of the schema of a question."""
    inputs = gate.call("list_inputs", task_id=task_id, **caller)["inputs"]
    question: dict[str, Any] = next((row for row in inputs if row["key"] == key), {})
    schema: dict[str, Any] = question.get("schema") or {}
    if not (properties := schema.get("properties", {})):
        return None
    click.echo(terminal.escape_text(question["message"]))
    given = {name: ask_for_member(name, rule, name in schema.get("required", ())) for name, rule in properties.items()}
    return {name: value for name, value in given.items() if value is not None}


def ask_for_member(name: str, rule: Mapping[str, Any], required: bool) -> Any:
    """Ask for one member; an empty line leaves it out where it may be left out."""
    title = terminal.escape_text(str(rule.get("title", name)))
    if rule.get("type") == "boolean":
        return click.confirm(title, default=bool(rule.get("default", False)))
    choices = [choice for choice in rule.get("enum", ()) if isinstance(choice, str)]
    default = rule.get("default", None if required else "")
    text = click.prompt(title, type=click.Choice(choices) if choices and required else str, default=default)
    return None if text == "" and not required else (
        text if rule.get("type", "string") == "string" else read_json(str(text)))
