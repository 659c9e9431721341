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

from asyncgate.commands import docs, terminal
from asyncgate.commands.main import main
from asyncgate.commands.site import HOME, LINK, OTHERS, PICTURES, DocPage, read_pages, relink
from tests.support.installing import ROOT, built, installed, shared, wheel

__all__ = ["built", "installed", "shared", "wheel"]
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
def site(built: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in built.iterdir() if file.suffix in (".html", ".md", ".txt")}


@pytest.fixture(scope="module")
def pages(site: dict[str, str]) -> dict[str, Found]:
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


@pytest.mark.parametrize("name", ["workers", "workers.md", "docs/workers.md", "WORKERS"])
def test_a_page_is_printed_as_it_was_written_where_a_program_reads_it(name: str) -> None:
    assert run(name).stdout == (ROOT / "docs" / "workers.md").read_text()


def test_the_list_names_every_page_and_what_it_is_about() -> None:
    lines = run().stdout.splitlines()

    assert [line.split()[0] for line in lines[1:]] == list(read_pages())
    assert "A durable task gate for agents that forget." in lines[1]


def test_the_list_and_a_page_are_there_as_json() -> None:
    listed, page = json.loads(run("--json").stdout), json.loads(run("workers", "--json").stdout)

    assert [entry["name"] for entry in listed] == list(read_pages())
    assert {**next(entry for entry in listed if entry["name"] == "workers"),
            "text": read_pages()["workers"].text} == page


def test_an_unknown_page_is_told_with_the_name_that_is_near() -> None:
    told = run("tutorials")

    assert (told.exit_code, told.stdout) == (4, "")
    assert "there is no page 'tutorials'. Did you mean tutorial?" in told.stderr


def test_a_page_is_laid_out_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(terminal, "is_terminal", lambda _: True)
    monkeypatch.setattr("click.echo_via_pager", shown.append)

    docs.show_page(read_pages()["workers"])

    assert "<!--" not in shown[0]
    assert read_pages()["workers"].title in shown[0]
    assert f"# {read_pages()['workers'].title}" not in shown[0]


# The site.


def test_every_page_is_there_as_html_and_as_markdown(site: dict[str, str]) -> None:
    stems = [page.stem for page in read_pages().values()]

    assert {name for name in site if name.endswith(".html")} == {f"{stem}.html" for stem in (*stems, "search")}
    assert {name for name in site if name.endswith(".md")} == {f"{stem}.md" for stem in stems} | {"SKILL.md"}
    assert [stem for stem in stems if f'href="{stem}.md"' not in site[f"{stem}.html"]] == []


def test_every_link_leads_to_a_page_and_a_heading_that_are_there(
    pages: dict[str, Found], site: dict[str, str], built: Path
) -> None:
    broken = []
    for name, page in pages.items():
        for link in (link for link in page.links if not OUTSIDE.match(link)):
            there, anchor = urldefrag(link)
            there = there or name
            if not (built / there).exists() or (anchor and there in pages and anchor not in pages[there].ids):
                broken.append(f"{name}: {link}")

    assert broken == []


def test_every_link_in_the_markdown_leads_to_markdown_or_to_a_picture(site: dict[str, str], built: Path) -> None:
    links = [(name, link) for name, text in site.items() if name.endswith((".md", ".txt")) and name != "SKILL.md"
             for part in re.split(r"```.*?```", text, flags=re.S)[::1] for _, link in LINK.findall(part)]

    assert links
    assert [(name, link) for name, link in links if not OUTSIDE.match(link) and not link.startswith("#")
            and not (built / urldefrag(link)[0]).exists()] == []


def test_no_page_loads_anything_from_elsewhere_and_all_work_below_a_path(pages: dict[str, Found], built: Path) -> None:
    loads = {urldefrag(load)[0].partition("?")[0] for page in pages.values() for load in page.loads} - {"data:,", ""}

    assert len(loads) > 10
    assert [load for load in loads if not (built / load).exists()] == []
    assert [link for page in pages.values() for link in page.links if link.startswith("/")] == []
    styles = {load: (built / load).read_text() for load in loads if load.endswith(".css")}
    assert [load for load, text in styles.items() if re.search(r"@import|url\([\"']?(?:https?:)?//", text)] == []


def test_the_pages_are_for_light_and_dark_and_for_narrow_windows(site: dict[str, str]) -> None:
    pages = {name: text for name, text in site.items() if name.endswith(".html")}

    assert [name for name, text in pages.items() if '<meta name="color-scheme" content="light dark">' not in text] == []
    assert [name for name, text in pages.items() if '<meta name="viewport" content="width=device-width' not in text
            ] == []


def test_code_is_coloured_and_the_marks_of_the_tests_are_left_out(site: dict[str, str]) -> None:
    assert '<span class="k' in site["workers.html"]
    assert "<!-- worker" not in site["workers.html"]
    assert "<!-- worker" in site["workers.md"]


def test_each_page_says_in_its_head_what_it_is_about_and_names_all_pages(site: dict[str, str]) -> None:
    known = read_pages()

    assert f'<meta content="{known["workers"].about}" name="description" />' in site["workers.html"]
    assert [page.stem for page in known.values() if f'href="{page.stem}.html"' not in site["glossary.html"]
            and page.stem != "glossary"] == []


def test_the_search_knows_every_page_and_the_words_of_its_headings(built: Path) -> None:
    index = json.loads((built / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))

    assert set(index["docnames"]) == {page.stem for page in read_pages().values()}
    assert "Start a gate" in index["alltitles"]


def test_the_table_of_contents_for_language_models_has_the_form_of_llmstxt_org(site: dict[str, str]) -> None:
    title, summary, _, *sections = re.split(r"\n\n(?!- )", site["llms.txt"])

    assert title == "# AsyncGate"
    assert summary.startswith(f"> {read_pages()['readme'].about} ")
    assert all(re.fullmatch(r"## [A-Z][a-z ]+\n\n(- \[[^]]+\]\([^)]+\): \S.*\n?)+", section) for section in sections)
    listed = re.findall(r"\]\(([^)]+)\): ", site["llms.txt"])
    assert listed == ["SKILL.md", *(f"{page.stem}.md" for page in read_pages().values())]


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


# Building and opening it.


def test_the_site_has_the_pictures_of_the_pages(built: Path) -> None:
    pictures = {picture.name: picture.read_bytes() for picture in (HOME / PICTURES).glob("*.png")}

    assert pictures
    assert {name: (built / name).read_bytes() for name in pictures} == pictures


def test_without_its_generator_the_site_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sphinx.cmd.build", None)

    refused = run("--build", str(tmp_path / "site"))

    assert refused.exit_code == 1
    assert "pip install 'asyncgate[docs]'" in refused.stderr
    assert list(tmp_path.iterdir()) == []


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
def opened(installed: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Open the documentation of an installed gate in a browser that only says where it was sent to."""
    sent, browser, running = tmp_path / "sent", tmp_path / "browser", []
    os.mkfifo(sent)
    browser.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" > '{sent}'\n")
    browser.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def open_it(*arguments: str) -> str:
        running.append(subprocess.Popen([installed / "asyncgate", "docs", "--open", *arguments], cwd=tmp_path,
                                        env={**environment, "BROWSER": str(browser)}, stdout=subprocess.DEVNULL))
        return sent.read_text()

    yield open_it
    for process in running:
        process.terminate()
        process.wait()


def test_the_site_of_an_installed_gate_is_opened_in_a_browser_and_is_that_of_the_checkout(
        opened: Callable[..., str], built: Path) -> None:
    url = opened("workers")

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/workers\.html", url)
    for file in (file for file in built.rglob("*") if file.is_file() and file.name != ".buildinfo"):
        with urlopen(url.replace("workers.html", file.relative_to(built).as_posix())) as answer:
            assert answer.read() == file.read_bytes(), file.name
    for name, kind in (("workers.html", "text/html"), ("workers.md", "text/plain"), ("llms.txt", "text/plain")):
        with urlopen(url.replace("workers.html", name)) as answer:
            assert answer.headers.get_content_type() == kind
