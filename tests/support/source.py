"""The source of the house, read and parsed once for all tests of a process."""

from __future__ import annotations

import ast
import contextlib
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """Parse a file; nobody changes what is returned."""
    with kept_for_good():
        return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of `ast.walk`."""
    with kept_for_good():
        return tuple(ast.walk(tree(path)))


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """Do not look for garbage among millions of nodes, all of which stay: that takes longer than to parse them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
