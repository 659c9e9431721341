"""`asyncgate docs`: list, show, open and build the documentation, without a network."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import click
import msgspec

from asyncgate.commands import calling, site, terminal


@click.command(epilog="Example: asyncgate docs workers | less")
@click.argument("page", required=False)
@click.option("--open", "opens", is_flag=True, help="Serve the site locally and open it in a browser; Ctrl-C stops it.")
@click.option("--build", "folder", metavar="DIRECTORY", type=click.Path(file_okay=False, path_type=Path),
              help="Write the site: llms.txt, and each page as HTML and as Markdown.")
@calling.as_json
def docs(page: str | None, opens: bool, folder: Path | None, as_json: bool) -> None:
    """Read the documentation, without a network.

    Without PAGE this lists the pages.  A PAGE is shown in the terminal, or printed as Markdown in a pipe.  --open shows
    all pages as a site, starting at PAGE; --build writes the site for any web server and path.  The site needs the
    extra `docs`.
    """
    known = site.read_pages()
    if folder and (page or opens):
        raise click.UsageError("--build writes all pages; it excludes PAGE and --open")
    if as_json and (folder or opens):
        raise click.UsageError("--json excludes --build and --open")
    if folder:
        write_site(folder)
        return click.echo(folder / "index.html")
    chosen = find_page(page, known) if page else None
    if opens:
        return serve_site(f"{chosen.stem}.html" if chosen else "")
    if as_json:
        return click.echo(msgspec.json.encode(chosen or [
            {name: getattr(page, name) for name in ("name", "path", "section", "title", "about")}
            for page in known.values()]))
    show_page(chosen) if chosen else list_pages(known)


def find_page(text: str, known: Mapping[str, site.DocPage]) -> site.DocPage:
    """Find a page by its name in any spelling, or exit with a similar name."""
    name = text.lower().removesuffix(".md").rpartition("/")[2].replace("_", "-")
    if name not in known:
        near = calling.suggest_names(name, [*known])
        raise calling.exit_with(
            f"there is no page {terminal.escape_text(text)!r}.{near} `asyncgate docs` lists the pages.",
            calling.EXIT_NOT_FOUND)
    return known[name]


def list_pages(known: Mapping[str, site.DocPage]) -> None:
    """Print the names and topics of the pages."""
    terminal.show_table(["page", "about"], [{"page": name, "about": page.about} for name, page in known.items()])
    click.echo("asyncgate docs PAGE shows one; --open shows all of them in a browser", err=True)


def show_page(page: site.DocPage) -> None:
    """Show a page: as Markdown to a program, else formatted in a pager."""
    if not terminal.is_terminal(sys.stdout):
        return click.echo(page.text, nl=False)
    from rich.markdown import Markdown

    on = terminal.console()
    with on.capture() as drawn:
        on.print(Markdown(page.text, hyperlinks=False))
    click.echo_via_pager(drawn.get())


# The site.


def write_site(folder: Path) -> None:
    """Write the site into a folder that is new, empty, or contains an earlier site."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "llms.txt").exists():
        raise click.UsageError(f"{folder} contains other files (it has no llms.txt of an earlier site): "
                               "use a new or empty directory")
    try:
        site.build_site(folder)
    except site.SiteError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from None


class Reader(SimpleHTTPRequestHandler):
    """Sends the files of the site; text is UTF-8."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".md": "text/plain; charset=utf-8",
                      ".txt": "text/plain; charset=utf-8"}

    def log_message(self, *_: object) -> None:
        """Write no line for each file."""


def serve_site(first: str) -> None:
    """Serve the site on loopback and open it in a browser, until Ctrl-C."""
    with TemporaryDirectory() as folder:
        write_site(Path(folder))
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Reader, directory=folder)) as server:
            url = f"http://127.0.0.1:{server.server_port}/{first}"
            serving = Thread(target=server.serve_forever, daemon=True)
            serving.start()
            click.echo(f"{url} (Ctrl-C stops it)")
            try:
                if not webbrowser.open(url):
                    click.echo("no browser found: open the URL on this machine", err=True)
                serving.join()
            except KeyboardInterrupt:
                server.shutdown()
