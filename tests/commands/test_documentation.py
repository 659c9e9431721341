"""The documentation without a network: its pages on the command line, and the static site that is made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result

from asyncgate.commands import docs
from asyncgate.commands.main import main
from asyncgate.commands.site import (
    LINK,
    OTHERS,
    DocPage,
    build_site,
    make_parser,
    read_pages,
    read_pictures,
    relink,
    render_contents,
)
from tests.conftest import Node

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["docs", *arguments], prog_name="asyncgate")


class Found(HTMLParser):
    """What a page of HTML points to, what it loads, and where one can point to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note links, loads and anchors."""
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "srcset", "action"):
                (self.links if tag == "a" else self.loads).append(value or "")


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    return build_site()


@pytest.fixture(scope="module")
def found(site: dict[str, str]) -> dict[str, Found]:
    return {name: Found(text) for name, text in site.items() if name.endswith(".html")}


# Pages.


def test_every_page_of_the_repository_is_there_with_a_title_and_a_first_sentence() -> None:
    known = read_pages()

    assert {page.path for page in known.values()} == {
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), "README.md", "CHANGELOG.md", "SECURITY.md"}
    assert [page.path for page in known.values() if page.title == page.name or len(page.about) < 15] == []
    assert next(iter(known)) == "readme"
    assert {name for name, page in known.items() if page.section == OTHERS} == {"contents", "changelog"}
    assert len({page.title for page in known.values()}) == len(known)
    assert len({page.stem.lower() for page in known.values()}) == len(known)


@pytest.mark.parametrize("said", ["workers", "workers.md", "docs/workers.md", "WORKERS"])
def test_a_page_is_printed_as_it_was_written_where_a_program_reads_it(said: str) -> None:
    assert run(said).stdout == (ROOT / "docs" / "workers.md").read_text()


def test_the_list_names_every_page_and_what_it_is_about() -> None:
    lines = run().stdout.splitlines()

    assert [line.split()[0] for line in lines[1:]] == list(read_pages())
    assert "A durable task gate for agents that forget." in lines[1]


def test_the_list_and_a_page_are_there_as_json() -> None:
    listed, page = json.loads(run("--json").stdout), json.loads(run("workers", "--json").stdout)

    assert [one["name"] for one in listed] == list(read_pages())
    assert {**next(one for one in listed if one["name"] == "workers"), "text": read_pages()["workers"].text} == page


def test_an_unknown_page_is_told_with_the_name_that_is_near() -> None:
    told = run("tutorials")

    assert (told.exit_code, told.stdout) == (4, "")
    assert "there is no page 'tutorials'. Did you mean tutorial?" in told.stderr


def test_a_page_is_laid_out_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(docs, "is_terminal", lambda _: True)
    monkeypatch.setattr("click.echo_via_pager", shown.append)

    docs.show_page(read_pages()["workers"])

    assert "<!--" not in shown[0]
    assert read_pages()["workers"].title in shown[0]
    assert f"# {read_pages()['workers'].title}" not in shown[0]


# The site.


def test_every_page_is_there_as_html_and_as_markdown(site: dict[str, str]) -> None:
    stems = [page.stem for page in read_pages().values()]

    assert {name for name in site if name.endswith(".html")} == {f"{stem}.html" for stem in stems}
    assert {name for name in site if name.endswith(".md")} == {f"{stem}.md" for stem in stems} | {"SKILL.md"}
    assert [stem for stem in stems if f'href="{stem}.md"' not in site[f"{stem}.html"]] == []


def test_every_link_leads_to_a_page_and_a_heading_that_are_there(found: dict[str, Found], site: dict[str, str]) -> None:
    broken = []
    for name, page in found.items():
        for link in (link for link in page.links if not OUTSIDE.match(link)):
            there, anchor = urldefrag(link)
            there = there or name
            if there not in site or (anchor and anchor not in found[there].ids):
                broken.append(f"{name}: {link}")

    assert broken == []


def test_every_link_in_the_markdown_leads_to_markdown_or_to_a_picture(site: dict[str, str]) -> None:
    links = [(name, link) for name, text in site.items() if name.endswith((".md", ".txt")) and name != "SKILL.md"
             for part in re.split(r"```.*?```", text, flags=re.S)[::1] for _, link in LINK.findall(part)]

    there = site.keys() | read_pictures().keys()
    assert links
    assert [(name, link) for name, link in links
            if not OUTSIDE.match(link) and not link.startswith("#") and urldefrag(link)[0] not in there] == []


def test_no_page_loads_anything_from_elsewhere_and_all_work_below_a_path(
    found: dict[str, Found], site: dict[str, str]
) -> None:
    pictures = read_pictures().keys()
    loads = {load for page in found.values() for load in page.loads} - {"data:,"}

    assert {load for load in loads if not load.endswith(".md")} == {
        "style.css", "code.css", "search.js", "search-index.js", *pictures}
    assert loads <= site.keys() | pictures
    assert [link for page in found.values() for link in page.links if link.startswith("/")] == []
    assert [name for name in ("style.css", "code.css", "search.js") if re.search(r"@import|url\(|https?:", site[name])
            ] == []


def test_no_anchor_stands_twice_on_a_page(found: dict[str, Found]) -> None:
    assert {name: page.ids for name, page in found.items() if len(set(page.ids)) < len(page.ids)} == {}


def test_the_pages_are_for_light_and_dark_and_for_narrow_windows(site: dict[str, str]) -> None:
    assert [name for name, text in site.items() if name.endswith(".html")
            and '<meta name="viewport" content="width=device-width, initial-scale=1">' not in text] == []
    assert [name for name in ("style.css", "code.css") if "@media (prefers-color-scheme: dark)" not in site[name]] == []
    # What is wider than the window scrolls by itself: code and tables.
    assert re.search(r"^pre \{.*overflow-x: auto", site["style.css"], re.M)
    assert re.search(r"^table \{.*display: block.*overflow-x: auto", site["style.css"], re.M)


def brightness(colour: str) -> float:
    """The relative luminance of a colour (WCAG 2)."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = (int(digits[at:at + 2], 16) / 255 for at in (0, 2, 4))
    return sum(weight * (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
               for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((brightness(one), brightness(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("at", [0, 1], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(site: dict[str, str], at: int) -> None:
    palette = dict(re.findall(r"--(\w+): (#\w+);", re.findall(r":root \{.*?\}", site["style.css"], re.S)[at]))
    code = re.findall(r"pre code (\.\w+) \{[^}]*?(?<![-\w])color: (#\w+)", site["code.css"].split("@media")[at])
    texts = {**{name: palette[name] for name in ("ink", "faint", "link")}, **dict(code)}
    del texts[".w"]         # white space has no text

    assert len(texts) > 20
    assert {name for name, colour in texts.items() if contrast(colour, palette["shade"]) < 4.5} == set()
    assert {name for name in ("ink", "faint", "link") if contrast(palette[name], palette["paper"]) < 4.5} == set()


def test_code_is_coloured_and_the_marks_of_the_tests_are_left_out(site: dict[str, str]) -> None:
    assert '<span class="k' in site["workers.html"]
    assert "<!-- " not in site["workers.html"]
    assert "<!-- " in site["workers.md"]


def test_the_table_of_contents_for_language_models_has_the_form_of_llmstxt_org(site: dict[str, str]) -> None:
    title, summary, _, *sections = re.split(r"\n\n(?!- )", site["llms.txt"])

    assert title == "# AsyncGate"
    assert summary.startswith(f"> {read_pages()['readme'].about} ")
    assert all(re.fullmatch(r"## [A-Z][a-z ]+\n\n(- \[[^]]+\]\([^)]+\): \S.*\n?)+", section) for section in sections)
    listed = re.findall(r"\]\(([^)]+)\): ", site["llms.txt"])
    assert listed == ["SKILL.md", *(f"{page.stem}.md" for page in read_pages().values())]


def test_the_search_knows_every_heading_of_every_page(site: dict[str, str], found: dict[str, Found]) -> None:
    sections = json.loads(site["search-index.js"].removeprefix("window.sections = ").rstrip(";\n"))

    places = {section["at"] for section in sections}
    assert places == {f"{name}#{anchor}" for name, page in found.items() for anchor in page.ids if anchor != "pages"}
    assert [section for section in sections if not (section["page"] and section["heading"])] == []


def test_the_search_finds_sections_by_their_words_headings_first(
    node_for_openapi: Node, site: dict[str, str], tmp_path: Path
) -> None:
    for name, text in site.items():
        (tmp_path / name).write_text(text)
    page = str(tmp_path / "tutorial.html")
    script = ROOT.joinpath("tests", "support", "site_search.mjs").read_text()
    searches = ["Start a GATE", "renew_every_seconds lease", "<b>", "xyzzy-is-nowhere"]

    ran = node_for_openapi.run("node", "--input-type=module", "-", page, *searches, input=script)

    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    by_heading, by_words, _, nothing = told["results"]
    assert not told["hidden"]
    assert ["tutorial.html#start-a-gate", "Tutorial: Start a gate"] in by_heading
    assert any(at.startswith("workers.html#") for at, _ in by_words)
    assert len(by_words) <= 12
    assert (nothing, told["after"]) == ([], [])


def made(text: str, path: str = "docs/a.md") -> DocPage:
    return DocPage("a", path, "Use it", text, "A", "About.")


@pytest.mark.parametrize(("written", "meant"), [
    ("[w](b.md#x)", "[w](b.md#x)"),
    ("[w](../README.md)", "[w](index.md)"),
    ("[w](#here)", "[w](#here)"),
    ("[w](https://example.com/b.md)", "[w](https://example.com/b.md)"),
    ("[`gate`](../asyncgate.py)", "`gate`"),
    ("![It](pictures/it.png)", "![It](it.png)"),
    ("```\n[w](../README.md)\n```", "```\n[w](../README.md)\n```"),
])
def test_a_link_holds_in_the_site_or_is_only_its_words(written: str, meant: str) -> None:
    known = {"a": made(written), "b": DocPage("b", "docs/b.md", "", "", "B", ""),
             "readme": DocPage("readme", "README.md", "", "", "R", "")}

    assert relink(known["a"], known) == meant


def test_a_page_of_one_chapter_lists_no_chapters() -> None:
    assert render_contents(make_parser().parse("# A\n\n## One\n")) == ""


# Building and opening it.


def test_the_site_is_built_into_a_new_folder_and_again_over_itself(tmp_path: Path, site: dict[str, str]) -> None:
    for _ in range(2):
        told = run("--build", str(tmp_path / "public" / "docs"))

        assert told.exit_code == 0, told.output
        written = {file.name: file.read_bytes() for file in (tmp_path / "public" / "docs").iterdir()}
        assert written == {name: text.encode() for name, text in site.items()} | read_pictures()


def test_the_site_is_not_built_among_the_files_of_somebody(tmp_path: Path) -> None:
    (tmp_path / "thesis.md").write_text("mine")

    told = run("--build", str(tmp_path))

    assert told.exit_code == 2
    assert "use a new or empty directory" in told.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.md"]


@pytest.mark.parametrize(("also", "rule"), [
    ("workers", "excludes PAGE and --open"), ("--open", "excludes PAGE and --open"),
    ("--json", "excludes --build and --open")])
def test_a_build_is_of_all_pages_and_prints_none(tmp_path: Path, also: str, rule: str) -> None:
    told = run("--build", str(tmp_path / "site"), also)

    assert told.exit_code == 2
    assert rule in told.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Open the documentation in a browser that only says where it was sent to."""
    sent, browser, running = tmp_path / "sent", tmp_path / "browser", []
    os.mkfifo(sent)
    browser.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" > '{sent}'\n")
    browser.chmod(0o755)

    def open_it(*arguments: str) -> str:
        running.append(subprocess.Popen([sys.executable, "-m", "asyncgate", "docs", "--open", *arguments],
                                        env={**os.environ, "BROWSER": str(browser)}, stdout=subprocess.DEVNULL))
        return sent.read_text()

    yield open_it
    for one in running:
        one.terminate()
        one.wait()


@pytest.mark.parametrize(("page", "file"), [((), ""), (("workers",), "workers.html")])
def test_the_site_is_opened_in_a_browser(
    opened: Callable[..., str], site: dict[str, str], page: tuple[str, ...], file: str
) -> None:
    url = opened(*page)

    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/{file}", url)
    for name in (file or "index.html", "style.css", "workers.md"):
        with urlopen(f"{url.removesuffix(file)}{name}") as answer:
            assert answer.read().decode() == site[name]
            assert answer.headers.get_content_charset() == "utf-8"
