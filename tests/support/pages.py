"""The documentation as its tests read it: pages, fenced blocks with their marks, inline code, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = next(folder for folder in Path(__file__).parents if (folder / "asyncgate.py").is_file())
ROOTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "AGENTS.md"]
PAGES = [*ROOTS, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S)
MARK = re.compile(r"<!-- (?P<name>[\w:-]+) ?(?P<more>.*?) ?-->\n\Z")


class Block(NamedTuple):
    """A fenced block; `mark` and `more` come from a comment in the line before it."""

    page: Path
    line: int
    mark: str
    more: str
    language: str
    text: str

    def __repr__(self) -> str:
        return self.place

    @property
    def place(self) -> str:
        """Return where the block begins, for the name of a test."""
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Walk the fenced blocks of a page."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        mark = MARK.search(text[:match.start()])
        yield Block(page, text[:match.start()].count("\n") + 1, mark["name"] if mark else "",
                    mark["more"] if mark else "", match["language"], match["text"])


def blocks(*languages: str, mark: str | None = None) -> list[Block]:
    """Return the blocks of all pages in some languages, or those under a mark."""
    return [block for page in PAGES for block in blocks_of(page)
            if block.language in languages and mark in (None, block.mark)]


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def code_of(page: Path) -> list[str]:
    """Return the inline code of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    heads = re.findall(r"^#+ (.+)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links_of(page: Path) -> list[str]:
    """Return what a page links to inside the project."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) if not re.match(r"\w+:", link)]


def commands_in(script: str) -> Iterator[list[str]]:
    """Walk the simple commands of a shell script, each as its words."""
    script = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", script, flags=re.M | re.S).replace("\\\n", " ")
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", "", script), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();<>|&\n"):
            yield words
            words = []
        else:
            words.append(word)
    yield words
