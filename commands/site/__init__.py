"""The pages of the documentation, and the static site that Sphinx makes of them.

markdown-it-py reads the pages as a repository host does: CommonMark with tables.  `conf.py` beside this file sets
Sphinx up.  The site is read without a network: every link is relative, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from msgspec import Struct

from asyncgate.commands.skill import SKILL

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

HERE = Path(__file__).parent
HOME = HERE.parents[1]          # the folder of the checkout or of the installed package
# Pages whose names differ from their files.
PAGE_NAMES = {"README.md": "readme", "docs/README.md": "contents", "SECURITY.md": "security-policy",
         "CHANGELOG.md": "changelog"}
PICTURES = "docs/pictures"      # of these pages; in the site they lie beside them
CONTENTS = "docs/README.md"     # defines the sections and the order of pages
FIRST, OTHERS = "Start here", "More"
SITE_NAME = "AsyncGate"
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.S | re.M)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]{0,200}\])*)\]\(([^()\s]+)\)")
SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.S)


class SiteError(Exception):
    """Why there is no site."""


class DocPage(Struct, frozen=True):
    """One page: its name, its path in the repository, its section and its Markdown."""

    name: str
    path: str
    section: str
    text: str
    title: str
    about: str      # its first sentence

    @property
    def stem(self) -> str:
        """Return the name of the page's files in the site."""
        return "index" if self.name == "readme" else self.name


# Reading.


def read_pages() -> dict[str, DocPage]:
    """Read every page, in reading order."""
    there = [*(f"docs/{path.name}" for path in sorted((HOME / "docs").glob("*.md"))), *PAGE_NAMES]
    known = {path: section for path, section in read_sections().items() if path in there}
    order = [*known, *(path for path in there if path not in known)]
    return {page.name: page for page in (read_page(path, known.get(path, OTHERS)) for path in dict.fromkeys(order))}


def read_sections() -> dict[str, str]:
    """Read the table of contents: the section of every linked file, in order."""
    sections, section = {"README.md": FIRST}, OTHERS
    for opened, inline in pairwise(make_parser().parse((HOME / CONTENTS).read_text(encoding="utf-8"))):
        if opened.type == "heading_open" and opened.tag == "h2":
            section = strip_markup(inline)
        for part in inline.children or ():
            if part.type == "link_open":
                sections.setdefault(resolve_link(str(part.attrGet("href")), CONTENTS), section)
    return sections


def resolve_link(link: str, here: str) -> str:
    """Return the repository file that a link on a page points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), link.partition("#")[0]))


def read_page(path: str, section: str) -> DocPage:
    """Read one page."""
    text = (HOME / path).read_text(encoding="utf-8")
    # What is listed of a page is at its beginning: to parse more takes most of a second for all of them.
    tokens = make_parser().parse("\n## ".join(text.split("\n## ", 2)[:2]))
    name = PAGE_NAMES.get(path, posixpath.basename(path).removesuffix(".md"))
    first = next(list_texts(tokens, "paragraph_open"), "")
    sentence = SENTENCE.match(first)
    about = (sentence[0] if sentence else first).removesuffix(":")
    return DocPage(name, path, section, text, next(list_texts(tokens, "heading_open"), name),
                about if about.endswith((".", "!", "?")) else f"{about}.")


def make_parser() -> MarkdownIt:
    """Return a parser for Markdown."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def list_texts(tokens: list[Token], kind: str) -> Iterator[str]:
    """Return the texts of all headings or paragraphs."""
    for opened, inline in pairwise(tokens):
        if opened.type == kind and not opened.hidden:
            yield strip_markup(inline)


def strip_markup(inline: Token) -> str:
    """Return the text of a line of Markdown without its markup."""
    return "".join(" " if part.type in ("softbreak", "hardbreak") else part.content
                   for part in inline.children or () if part.type != "html_inline")


# Markdown for the site.


def relink(page: DocPage, known: Mapping[str, DocPage]) -> str:
    """Return the Markdown with links for the site; a link to anything but a page or a picture becomes plain text."""
    by_path = {other.path: other for other in known.values()}

    def link(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        file = resolve_link(path, page.path)
        if posixpath.dirname(file) == PICTURES:
            return f"[{match[1]}]({posixpath.basename(file)})"
        there = by_path.get(file)
        return f"[{match[1]}]({there.stem}.md{mark}{anchor})" if there else match[1]

    parts = FENCED.split(page.text)         # fenced code stays unchanged
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def make_llms_txt(known: Mapping[str, DocPage]) -> str:
    """Return the table of contents for language models (llmstxt.org): a title, a summary, links in sections."""
    summary = next(list_texts(make_parser().parse(known["readme"].text), "paragraph_open"))
    lines = [f"# {SITE_NAME}", "", f"> {summary}", "",
             "Each page is also available as HTML: replace .md by .html in its URL.", "",
             "## Skill", "", "- [SKILL.md](SKILL.md): Teaches an agent to use the gate; start here to call it."]
    for section in dict.fromkeys(page.section for page in known.values()):
        lines += ["", f"## {section}", ""]
        lines += [f"- [{page.title}]({page.stem}.md): {page.about}" for page in known.values()
                  if page.section == section]
    return "\n".join(lines) + "\n"


# The site.


def build_site(folder: Path) -> None:
    """Write the site: each page as HTML and as Markdown, their pictures, llms.txt, the skill; raises SiteError."""
    try:
        from sphinx.cmd.build import build_main  # of the extra `docs`
    except ModuleNotFoundError:
        raise SiteError("the site is made by Sphinx: pip install 'asyncgate[docs]'; "
                        "`asyncgate docs PAGE` shows a page without it") from None
    known = read_pages()
    folder.mkdir(parents=True, exist_ok=True)
    # Order: first what shows a later run that the folder is a site's.
    (folder / "llms.txt").write_text(make_llms_txt(known), encoding="utf-8")
    copyfile(SKILL, folder / "SKILL.md")
    with TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        copytree(HOME / PICTURES, source, ignore=lambda _, names: [name for name in names if name[-4:] != ".png"])
        for page in known.values():
            (source / f"{page.stem}.md").write_text(relink(page, known), encoding="utf-8")
        if build_main(["-q", "-c", str(HERE), "-d", f"{scratch}/read", str(source), str(folder)]):
            raise SiteError("Sphinx cannot build the site; it says why above")
        copytree(source, folder, dirs_exist_ok=True)
