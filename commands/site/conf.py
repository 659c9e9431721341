"""The configuration of Sphinx for the site of the documentation (https://www.sphinx-doc.org)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from asyncgate.commands.site import SITE_NAME, read_pages

if TYPE_CHECKING:
    from sphinx.application import Sphinx

COMMENT = re.compile(r"^ *<!--.*?-->$", re.M)       # such as a marker of a tested example

project = SITE_NAME
extensions = ["myst_parser"]
myst_heading_anchors = 6
html_theme = "furo"
html_theme_options = {"source_view_link": "{filename}"}     # the Markdown that lies beside each page
html_title = SITE_NAME
html_copy_source = False
html_use_index = False
html_show_copyright = False
known = {page.stem: page for page in read_pages().values()}


def setup(app: Sphinx) -> None:
    """Have each page completed before Sphinx reads it."""
    app.connect("source-read", complete_page)


def complete_page(app: Sphinx, stem: str, source: list[str]) -> None:
    """Give a page its description, and the first page the sections of the contents."""
    about = json.dumps(known[stem].about)
    source[0] = f"---\nmyst:\n  html_meta:\n    description: {about}\n---\n\n{COMMENT.sub('', source[0])}"
    sections = dict.fromkeys(page.section for page in known.values()) if stem == "index" else ()
    for section in sections:
        pages = "\n".join(other for other, page in known.items() if page.section == section and other != stem)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{pages}\n```\n"
