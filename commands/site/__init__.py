"""The documentation: its pages, and the static site generated from them.

markdown-it-py reads the pages as a repository host does: CommonMark with tables.  The site can be built and read
without a network, because it contains its own style, search and code colours.  Every link is relative, so the site
works below any path.
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
    found, section = {"README.md": FIRST}, OTHERS
    for opened, inline in pairwise(make_parser().parse((HOME / CONTENTS).read_text(encoding="utf-8"))):
        if opened.type == "heading_open" and opened.tag == "h2":
            section = strip_markup(inline)
        for part in inline.children or ():
            if part.type == "link_open":
                found.setdefault(resolve_link(str(part.attrGet("href")), CONTENTS), section)
    return found


def resolve_link(link: str, here: str) -> str:
    """Return the repository file that a link on a page points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), link.partition("#")[0]))


def read_page(path: str, section: str) -> DocPage:
    """Read one page."""
    text = (HOME / path).read_text(encoding="utf-8")
    tokens = make_parser().parse(text)
    name = PAGE_NAMES.get(path, posixpath.basename(path).removesuffix(".md"))
    first = next(list_texts(tokens, "paragraph_open"), "")
    sentence = SENTENCE.match(first)
    about = (sentence[0] if sentence else first).removesuffix(":")
    return DocPage(name, path, section, text, next(list_texts(tokens, "heading_open"), name),
                about if about.endswith((".", "!", "?")) else f"{about}.")


def make_parser() -> MarkdownIt:
    """Return a parser for Markdown."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"highlight": colour_code}).enable(["table", "strikethrough"])


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

    def link(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        file = resolve_link(path, page.path)
        if posixpath.dirname(file) == PICTURES:
            return f"[{found[1]}]({posixpath.basename(file)})"
        there = by_path.get(file)
        return f"[{found[1]}]({there.stem}.md{mark}{anchor})" if there else found[1]

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


def build_site() -> dict[str, str]:
    """Build the site; return the contents of its files by name."""
    known, entries = read_pages(), list[dict[str, str]]()
    files = {name: (HERE / name).read_text(encoding="utf-8") for name in ("style.css", "search.js")}
    files |= {"code.css": make_code_style(), "llms.txt": make_llms_txt(known),
              "SKILL.md": SKILL.read_text(encoding="utf-8")}
    for page in known.values():
        files[f"{page.stem}.md"] = text = relink(page, known)
        tokens = add_anchors([token for token in make_parser().parse(text) if not is_comment(token)])
        files[f"{page.stem}.html"] = render_html(page, known, tokens)
        entries += make_search_entries(page, tokens)
    files["search-index.js"] = f"window.sections = {json.dumps(entries, ensure_ascii=False)};\n"
    return files


def read_pictures() -> dict[str, bytes]:
    """Read the pictures of the site by their names."""
    return {path.name: path.read_bytes() for path in sorted((HOME / PICTURES).glob("*.png"))}


def is_comment(token: Token) -> bool:
    """Whether a token is a comment, such as a marker of a tested example."""
    return token.type == "html_block" and token.content.startswith("<!--")


def render_html(page: DocPage, known: Mapping[str, DocPage], tokens: list[Token]) -> str:
    """Return the complete HTML of a page."""
    template = Template((HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(page.title if page.title == SITE_NAME else f"{page.title} – {SITE_NAME}"),
        about=html.escape(page.about), markdown=f"{page.stem}.md", body=render_page(tokens),
        contents=render_contents(tokens), pages=render_navigation(page, known), around=render_neighbours(page, known))


def render_page(tokens: list[Token]) -> str:
    """Return the HTML of a page's text; links to a page's Markdown become links to its HTML."""
    for token in tokens:
        for part in token.children or ():
            if part.type == "link_open" and "://" not in (there := str(part.attrGet("href"))):
                part.attrSet("href", re.sub(r"\.md(?=#|$)", ".html", there))
    reader = make_parser()
    return str(reader.renderer.render(tokens, reader.options, {}))


def add_anchors(tokens: list[Token]) -> list[Token]:
    """Give every heading the anchor that a repository host would give it."""
    seen: dict[str, int] = {}
    for opened, inline in pairwise(tokens):
        if opened.type == "heading_open":
            anchor = re.sub(r"[^\w\- ]", "", strip_markup(inline).lower()).replace(" ", "-")
            seen[anchor] = count = seen.get(anchor, -1) + 1
            opened.attrSet("id", f"{anchor}-{count}" if count else anchor)
    return tokens


def make_search_entries(page: DocPage, tokens: list[Token]) -> list[dict[str, str]]:
    """Split a page at its headings, for the search."""
    entries: list[dict[str, str]] = []
    for opened, token in pairwise(tokens):
        if opened.type == "heading_open":
            at = f"{page.stem}.html#{opened.attrGet('id')}"
            entries.append({"page": page.title, "heading": strip_markup(token), "at": at, "text": ""})
        elif entries and token.type in ("inline", "fence"):
            entries[-1]["text"] += (strip_markup(token) if token.children else token.content) + " "
    return entries


def render_contents(tokens: list[Token]) -> str:
    """Return the HTML list of a page's chapters."""
    found = [(opened.attrGet("id"), strip_markup(inline)) for opened, inline in pairwise(tokens)
             if opened.type == "heading_open" and opened.tag == "h2"]
    if len(found) < 2:
        return ""
    return "<ul>" + "".join(f'<li><a href="#{at}">{html.escape(said)}</a></li>' for at, said in found) + "</ul>"


def render_navigation(here: DocPage, known: Mapping[str, DocPage]) -> str:
    """Return the HTML list of all pages, by section."""
    lines = []
    for section in dict.fromkeys(page.section for page in known.values()):
        lines.append(f"<h2>{section}</h2>\n<ul>")
        for page in known.values():
            if page.section == section:
                current = ' aria-current="page"' if page is here else ""
                lines.append(f'<li><a href="{page.stem}.html"{current}>{html.escape(page.title)}</a></li>')
        lines.append("</ul>")
    return "\n".join(lines)


def render_neighbours(here: DocPage, known: Mapping[str, DocPage]) -> str:
    """Return links to the previous and the next page."""
    order = list(known.values())
    at = order.index(here)
    before, after = order[at - 1:at], order[at + 1:at + 2]
    return "".join(f'<a rel="{rel}" href="{page.stem}.html">{sign.format(html.escape(page.title))}</a>'
                   for rel, sign, found in (("prev", "← {}", before), ("next", "{} →", after)) for page in found)


# The colours of code.


def colour_code(code: str, language: str, _: str) -> str:
    """Highlight code; return code in an unknown language unchanged."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return str(highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True)))
    except ClassNotFound:
        return ""


def make_code_style() -> str:
    """Return the style sheet for code, in light and dark mode."""
    from pygments.formatters import HtmlFormatter

    light, dark = (str(HtmlFormatter(style=style, nobackground=True).get_style_defs("pre code"))
                   for style in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
