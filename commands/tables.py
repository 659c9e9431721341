"""The tables of docs/reference.md, made from what declares them.

`python -m asyncgate.commands.tables docs/reference.md` writes them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.settings import Settings, format_value, list_settings

if TYPE_CHECKING:
    from asyncgate import Operation


def format_markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table in Markdown."""
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def operations_table(operations: Iterable[Operation]) -> str:
    """Write one row per operation: its name, where REST has it, who may call it, and what it does."""
    return format_markdown(["operation", "REST", "roles", "scopes", "what it does"], (
        [f"`{op.name}`", "<br>".join(f"`{verb} {path}`" for verb, path in op.rest), ", ".join(op.roles) or "anybody",
         ", ".join(sorted(op.scope.split())) or "–", remove_clause_numbers(op.summary)]
        for op in sorted(operations, key=lambda op: op.name)))


def settings_table() -> str:
    """Write one row per setting: its name in the file, its default, and what it does."""
    rows = ([f"`{one.name}`", f"`{format_value(one, one.default) or ' '}`",
             f"{remove_clause_numbers(one.says)} ({one.kind})."]
            for one in list_settings(Settings))
    return format_markdown(["setting", "default", "what it does"], rows)


def metrics_table() -> str:
    """Write one row per metric: its name, its kind, its labels, and what it means."""
    from asyncgate.parts.metrics.shown import FAMILIES
    return format_markdown(["metric", "kind", "labels", "what it tells"], (
        [f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels) or "–", one.says]
        for one in FAMILIES))


def refusals(kind: type[GateError] = GateError) -> Iterator[type[GateError]]:
    """Walk the tree of errors below one."""
    for below in kind.__subclasses__():
        yield below
        yield from refusals(below)


def errors_table() -> str:
    """Write one row per code: its status, and what the classes that have it say of it."""
    meanings: dict[tuple[int, str], list[str]] = {
        (GateError.status, GateError.code): ["Something failed inside the gate; the log says why."]}
    for kind in refusals():
        if kind.__doc__:
            meanings.setdefault((kind.status, kind.code), []).append(kind.__doc__.partition("\n")[0])
    return format_markdown(["status", "code", "what it means"], (
        [str(status), f"`{code}`", "<br>".join(says)] for (status, code), says in sorted(meanings.items())))


def commands_of(group: click.Group, path: str = "asyncgate") -> Iterator[tuple[str, click.Command]]:
    """Walk the commands of a group, those of its groups among them."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def command_row(path: str, command: click.Command) -> list[str]:
    """Write a command's arguments, its options and the first sentence of its help."""
    arguments = [one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)]
    options = [f"`{one.opts[0]}`" for one in command.params if isinstance(one, click.Option) and not one.hidden]
    says = " ".join((command.help or "").split("\n\n")[0].split())
    return [f"`{' '.join([path, *arguments])}`", says, ", ".join(options) or "–"]


def commands_table(group: click.Group, operations: Iterable[str]) -> str:
    """Write one row per command that is not an operation."""
    apart = {f"asyncgate {name.replace('_', '-')}" for name in operations}
    return format_markdown(["command", "what it does", "options"], (
        command_row(path, command) for path, command in commands_of(group) if path not in apart))


def replace_tables(text: str, tables: dict[str, str]) -> str:
    """Put the tables between their markers."""
    for name, made in tables.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        before, after = re.search(pattern, text, re.S).groups()  # type: ignore[union-attr]
        text = re.sub(pattern, lambda _: f"{before}{made}\n{after}", text, flags=re.S)  # noqa: B023  # called at once
    return text


def tables() -> dict[str, str]:
    """Make every table."""
    from asyncgate.commands.main import main
    from asyncgate.parts.operations import OPERATIONS
    return {"operations": operations_table(OPERATIONS.values()), "errors": errors_table(),
            "commands": commands_table(main, OPERATIONS), "settings": settings_table(), "metrics": metrics_table()}


def main(arguments: Any = None) -> None:
    """Write the tables into a file."""
    path = Path((arguments or sys.argv[1:])[0])
    path.write_text(replace_tables(path.read_text(), tables()))


if __name__ == "__main__":
    main()
