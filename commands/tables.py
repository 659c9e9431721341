"""The README's tables, made from what declares them: `python -m asyncgate.commands.tables README.md` writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgate.parts.model.settings import Settings, leaves, shown

if TYPE_CHECKING:
    from asyncgate import Operation


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table in Markdown."""
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def operations_table(operations: Iterable[Operation]) -> str:
    """Write one row per operation: its name, where REST has it, who may call it, and what it does."""
    return table(["operation", "REST", "roles", "scopes", "what it does"], (
        [f"`{op.name}`", "<br>".join(f"`{verb} {path}`" for verb, path in op.rest), ", ".join(op.roles) or "anybody",
         ", ".join(sorted(op.scope.split())) or "–", op.summary]
        for op in sorted(operations, key=lambda op: op.name)))


def settings_table() -> str:
    """Write one row per setting: its name in the file, its default, and what it does."""
    rows = ([f"`{one.name}`", f"`{shown(one, one.default) or ' '}`", f"{one.says} ({one.kind})."]
            for one in leaves(Settings))
    return table(["setting", "default", "what it does"], rows)


def refreshed(text: str, tables: dict[str, str]) -> str:
    """Put the tables between their markers."""
    for name, made in tables.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        before, after = re.search(pattern, text, re.S).groups()  # type: ignore[union-attr]
        text = re.sub(pattern, lambda _: f"{before}{made}\n{after}", text, flags=re.S)  # noqa: B023  # called at once
    return text


def tables() -> dict[str, str]:
    """Make every table."""
    from asyncgate.parts.operations import OPERATIONS
    return {"operations": operations_table(OPERATIONS.values()), "settings": settings_table()}


def main(arguments: Any = None) -> None:
    """Write the tables into a file."""
    path = Path((arguments or sys.argv[1:])[0])
    path.write_text(refreshed(path.read_text(), tables()))


if __name__ == "__main__":
    main()
