"""The documentation: its pages as they lie in the repository, and the static site that is made of them.

markdown-it-py reads the pages as a repository host does: CommonMark with tables.  The site needs no network, neither to
build nor to read.  Its style, search and code colours are its own files.  Every link is relative, so the site works
below any path.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from msgspec import Struct

from asyncgate.commands.skill import SKILL

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

HERE = Path(__file__).parent
HOME = HERE.parents[1]          # the checkout, or the installed package
# The pages whose names are not those of their files.
PAGE_NAMES = {"README.md": "readme", "docs/README.md": "contents", "SECURITY.md": "security-policy",
         "CHANGELOG.md": "changelog"}
CONTENTS = "docs/README.md"     # says which page belongs to which section, and in which order
FIRST, OTHERS = "Start here", "More"
SITE_NAME = "AsyncGate"
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.S | re.M)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]{0,200}\])*)\]\(([^()\s]+)\)")
SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.S)


class DocPage(Struct, frozen=True):
    """One page: its name, where the repository has it, its section, and its Markdown as it was written."""

    name: str
    path: str
    section: str
    text: str
    title: str
    about: str      # its first sentence

    @property
    def stem(self) -> str:
        """Return the name of its files in the site."""
        return "index" if self.name == "readme" else self.name


# Reading.


def read_pages() -> dict[str, DocPage]:
    """Read every page, in the order in which they are to be read."""
    there = [*(f"docs/{path.name}" for path in sorted((HOME / "docs").glob("*.md"))), *PAGE_NAMES]
    known = {path: section for path, section in sections().items() if path in there}
    order = [*known, *(path for path in there if path not in known)]
    return {page.name: page for page in (read_page(path, known.get(path, OTHERS)) for path in dict.fromkeys(order))}


def sections() -> dict[str, str]:
    """Read the table of contents: the section of every file that it links to, in its order."""
    found, section = {"README.md": FIRST}, OTHERS
    for opened, inline in pairwise(markdown().parse((HOME / CONTENTS).read_text(encoding="utf-8"))):
        if opened.type == "heading_open" and opened.tag == "h2":
            section = plain_words(inline)
        for part in inline.children or ():
            if part.type == "link_open":
                found.setdefault(resolve_link(str(part.attrGet("href")), CONTENTS), section)
    return found


def resolve_link(link: str, here: str) -> str:
    """Return the file of the repository that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), link.partition("#")[0]))


def read_page(path: str, section: str) -> DocPage:
    """Read one page."""
    text = (HOME / path).read_text(encoding="utf-8")
    tokens = markdown().parse(text)
    name = PAGE_NAMES.get(path, posixpath.basename(path).removesuffix(".md"))
    first = next(words(tokens, "paragraph_open"), "")
    sentence = SENTENCE.match(first)
    about = (sentence[0] if sentence else first).removesuffix(":")
    return DocPage(name, path, section, text, next(words(tokens, "heading_open"), name),
                about if about.endswith((".", "!", "?")) else f"{about}.")


def markdown() -> MarkdownIt:
    """Return what reads Markdown."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"highlight": colour_code}).enable(["table", "strikethrough"])


def words(tokens: list[Token], kind: str) -> Iterator[str]:
    """List the texts of the headings or paragraphs."""
    for opened, inline in pairwise(tokens):
        if opened.type == kind and not opened.hidden:
            yield plain_words(inline)


def plain_words(inline: Token) -> str:
    """Return the words of a line of Markdown without their marks."""
    return "".join(" " if part.type in ("softbreak", "hardbreak") else part.content
                   for part in inline.children or () if part.type != "html_inline")


# Markdown as the site has it.


def relink(page: DocPage, known: Mapping[str, DocPage]) -> str:
    """Return the Markdown with links that hold in the site: to a page beside it, else only the words of the link."""
    by_path = {other.path: other for other in known.values()}

    def link(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        there = by_path.get(resolve_link(path, page.path))
        return f"[{found[1]}]({there.stem}.md{mark}{anchor})" if there else found[1]

    parts = FENCED.split(page.text)         # what stands between fences is shown as it is
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def llms_txt(known: Mapping[str, DocPage]) -> str:
    """Write the table of contents that language models read (llmstxt.org): a title, a summary, links in sections."""
    summary = next(words(markdown().parse(known["readme"].text), "paragraph_open"))
    lines = [f"# {SITE_NAME}", "", f"> {summary}", "",
             "Each page is also there as HTML: the same address with .html instead of .md.", "",
             "## Skill", "", "- [SKILL.md](SKILL.md): Teaches an agent to use the gate; start here to call it."]
    for section in dict.fromkeys(page.section for page in known.values()):
        lines += ["", f"## {section}", ""]
        lines += [f"- [{page.title}]({page.stem}.md): {page.about}" for page in known.values()
                  if page.section == section]
    return "\n".join(lines) + "\n"


# The site.


def build_site() -> dict[str, str]:
    """Make the site; return the texts of its files by name."""
    known, entries = read_pages(), list[dict[str, str]]()
    files = {name: (HERE / name).read_text(encoding="utf-8") for name in ("style.css", "search.js")}
    files |= {"code.css": code_colours(), "llms.txt": llms_txt(known), "SKILL.md": SKILL.read_text(encoding="utf-8")}
    for page in known.values():
        files[f"{page.stem}.md"] = text = relink(page, known)
        tokens = add_anchors([token for token in markdown().parse(text) if not is_comment(token)])
        files[f"{page.stem}.html"] = page_html(page, known, tokens)
        entries += search_entries(page, tokens)
    files["search-index.js"] = f"window.sections = {json.dumps(entries, ensure_ascii=False)};\n"
    return files


def is_comment(token: Token) -> bool:
    """Whether this is a comment, such as the marks by which tests find the examples."""
    return token.type == "html_block" and token.content.startswith("<!--")


def page_html(page: DocPage, known: Mapping[str, DocPage], tokens: list[Token]) -> str:
    """Write the whole HTML of a page."""
    template = Template((HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(page.title if page.title == SITE_NAME else f"{page.title} – {SITE_NAME}"),
        about=html.escape(page.about), markdown=f"{page.stem}.md", body=render_page(tokens), contents=contents(tokens),
        pages=navigation(page, known), around=around(page, known))


def render_page(tokens: list[Token]) -> str:
    """Write the HTML of a page; a link to the Markdown of a page leads to its HTML."""
    for token in tokens:
        for part in token.children or ():
            if part.type == "link_open" and "://" not in (there := str(part.attrGet("href"))):
                part.attrSet("href", re.sub(r"\.md(?=#|$)", ".html", there))
    reader = markdown()
    return str(reader.renderer.render(tokens, reader.options, {}))


def add_anchors(tokens: list[Token]) -> list[Token]:
    """Give every heading the anchor that the page of a repository would give it."""
    seen: dict[str, int] = {}
    for opened, inline in pairwise(tokens):
        if opened.type == "heading_open":
            anchor = re.sub(r"[^\w\- ]", "", plain_words(inline).lower()).replace(" ", "-")
            seen[anchor] = count = seen.get(anchor, -1) + 1
            opened.attrSet("id", f"{anchor}-{count}" if count else anchor)
    return tokens


def search_entries(page: DocPage, tokens: list[Token]) -> list[dict[str, str]]:
    """Part a page at its headings, for the search."""
    entries: list[dict[str, str]] = []
    for opened, token in pairwise(tokens):
        if opened.type == "heading_open":
            at = f"{page.stem}.html#{opened.attrGet('id')}"
            entries.append({"page": page.title, "heading": plain_words(token), "at": at, "text": ""})
        elif entries and token.type in ("inline", "fence"):
            entries[-1]["text"] += (plain_words(token) if token.children else token.content) + " "
    return entries


def contents(tokens: list[Token]) -> str:
    """List the chapters of a page."""
    found = [(opened.attrGet("id"), plain_words(inline)) for opened, inline in pairwise(tokens)
             if opened.type == "heading_open" and opened.tag == "h2"]
    if len(found) < 2:
        return ""
    return "<ul>" + "".join(f'<li><a href="#{at}">{html.escape(said)}</a></li>' for at, said in found) + "</ul>"


def navigation(here: DocPage, known: Mapping[str, DocPage]) -> str:
    """List all pages in their sections."""
    lines = []
    for section in dict.fromkeys(page.section for page in known.values()):
        lines.append(f"<h2>{section}</h2>\n<ul>")
        for page in known.values():
            if page.section == section:
                current = ' aria-current="page"' if page is here else ""
                lines.append(f'<li><a href="{page.stem}.html"{current}>{html.escape(page.title)}</a></li>')
        lines.append("</ul>")
    return "\n".join(lines)


def around(here: DocPage, known: Mapping[str, DocPage]) -> str:
    """Link to the page before and the page after this one."""
    order = list(known.values())
    at = order.index(here)
    before, after = order[at - 1:at], order[at + 1:at + 2]
    return "".join(f'<a rel="{rel}" href="{page.stem}.html">{sign.format(html.escape(page.title))}</a>'
                   for rel, sign, found in (("prev", "← {}", before), ("next", "{} →", after)) for page in found)


# The colours of code.


def colour_code(code: str, language: str, _: str) -> str:
    """Mark what the parts of some code are; what has no known language stays as it is."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return str(highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True)))
    except ClassNotFound:
        return ""


def code_colours() -> str:
    """Write the colours of code, for light and for dark."""
    from pygments.formatters import HtmlFormatter

    light, dark = (str(HtmlFormatter(style=style, nobackground=True).get_style_defs("pre code"))
                   for style in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
