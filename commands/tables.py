"""The tables of docs/reference.md, docs/data-map.md and docs/monitoring.md, generated from the code.

`python -m asyncgate.commands.tables docs/reference.md docs/data-map.md docs/monitoring.md` writes them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncgate.parts.model import errors
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.settings import Settings, format_value, list_settings

if TYPE_CHECKING:
    from asyncgate import Operation


def format_markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table in Markdown."""
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def make_operations_table(operations: Iterable[Operation]) -> str:
    """Return one row per operation: its name, method and path, roles, scope and summary."""
    return format_markdown(["operation", "REST", "roles", "scopes", "what it does"], (
        [f"`{op.name}`", "<br>".join(f"`{verb} {path}`" for verb, path in op.rest), ", ".join(op.roles) or "anybody",
         ", ".join(sorted(op.scope.split())) or "–", remove_clause_numbers(op.summary)]
        for op in sorted(operations, key=lambda op: op.name)))


def make_settings_table() -> str:
    """Return one row per setting: its name in the file, its default, and its description."""
    rows = ([f"`{setting.name}`", f"`{format_value(setting, setting.default) or ' '}`",
             f"{remove_clause_numbers(setting.says)} ({setting.kind})."]
            for setting in list_settings(Settings))
    return format_markdown(["setting", "default", "what it does"], rows)


def make_metrics_table() -> str:
    """Return one row per metric: its name, its kind, its labels, and what it means."""
    from asyncgate.parts.extras import list_families
    return format_markdown(["metric", "kind", "labels", "what it tells"], (
        [f"`{family.name}`", family.kind, ", ".join(f"`{label}`" for label in family.labels) or "–", family.says]
        for family in list_families()))


def walk_errors(kind: type[errors.GateError] = errors.GateError) -> Iterator[type[errors.GateError]]:
    """Yield an error class and all its subclasses."""
    for below in kind.__subclasses__():
        yield below
        yield from walk_errors(below)


def make_errors_table() -> str:
    """Return one row per error code: its status, and the descriptions of its classes."""
    meanings: dict[tuple[int, str], list[str]] = {
        (errors.GateError.status, errors.GateError.code): ["An internal error; the gate's log has the details."]}
    for kind in walk_errors():
        if kind.__doc__:
            meanings.setdefault((kind.status, kind.code), []).append(kind.__doc__.partition("\n")[0])
    return format_markdown(["status", "code", "what it means"], (
        [str(status), f"`{code}`", "<br>".join(says)] for (status, code), says in sorted(meanings.items())))


def walk_commands(group: click.Group, path: str = "asyncgate") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group, including those of nested groups."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walk_commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def make_command_row(path: str, command: click.Command) -> list[str]:
    """Return the row of a command: its arguments, its options and the first sentence of its help."""
    arguments = [param.make_metavar(click.Context(command)) for param in command.params
                 if isinstance(param, click.Argument)]
    options = [f"`{param.opts[0]}`" for param in command.params if isinstance(param, click.Option) and not param.hidden]
    says = " ".join((command.help or "").split("\n\n")[0].split())
    return [f"`{' '.join([path, *arguments])}`", says, ", ".join(options) or "–"]


def make_commands_table(group: click.Group, operations: Iterable[str]) -> str:
    """Return one row per command that is not an operation."""
    apart = {f"asyncgate {name.replace('_', '-')}" for name in operations}
    return format_markdown(["command", "what it does", "options"], (
        make_command_row(path, command) for path, command in walk_commands(group) if path not in apart))


def make_data_table() -> str:
    """Return one row per kind of stored row: its purpose, and what of it may be personal."""
    from asyncgate.parts.model.cards import CARDS, Says, list_fields
    from asyncgate.parts.model.stored import TABLES
    columns = ((Says.PRINCIPAL, Says.PERSON), (Says.CONTENT,), (Says.PLACE,), (Says.PROOF,))
    return format_markdown(["table", "why it is there", "names", "content", "places", "secrets"], (
        [f"`{table}`", CARDS[kind].purpose,
         *(", ".join(f"`{name}`" for name in list_fields(kind, *says)) or "–" for says in columns)]
        for kind, table in TABLES.items()))


def make_lifetimes_table() -> str:
    """Return one row per table: how long its rows are kept, by default, and who deletes them."""
    from asyncgate.backends.tables import list_lifetimes
    default = {setting.name: setting.default for setting in list_settings(Settings)}
    return format_markdown(["table", "how long", "by default", "who deletes it"], (
        [f"`{name}`: {lifetime.what}" if lifetime.what else f"`{name}`", lifetime.how_long,
         " and ".join(f"{default[setting]} days" for setting in lifetime.list_settings()) or "–", lifetime.ended_by]
        for name, lifetime in list_lifetimes().items()))


def replace_tables(text: str, tables: dict[str, str]) -> str:
    """Replace the tables between their markers; each page has some of them."""
    for name, made in tables.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        if (match := re.search(pattern, text, re.S)) is None:
            continue
        before, after = match.groups()
        text = re.sub(pattern, lambda _: f"{before}{made}\n{after}", text, flags=re.S)  # noqa: B023  # called at once
    return text


def make_tables() -> dict[str, str]:
    """Return every table by the name of its marker."""
    from asyncgate.commands.main import main
    from asyncgate.parts.operations import OPERATIONS
    return {"operations": make_operations_table(OPERATIONS.values()), "errors": make_errors_table(),
            "commands": make_commands_table(main, OPERATIONS), "settings": make_settings_table(),
            "metrics": make_metrics_table(), "data": make_data_table(), "lifetimes": make_lifetimes_table()}


def main(arguments: Any = None) -> None:
    """Update the tables in some files."""
    for path in map(Path, arguments or sys.argv[1:]):
        path.write_text(replace_tables(path.read_text(), make_tables()))


if __name__ == "__main__":
    main()
