"""`asyncgate login`, `logout` and `profiles`: gates and the credentials for them, kept in a file of their owner."""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

import click
import msgspec

from asyncgate.clients.http import DEFAULT_URL, is_private, root_of, split_url
from asyncgate.commands import profiles
from asyncgate.commands.calling import EXIT_NOT_FOUND, EXIT_WRONG, as_json, exit_with, gate_at
from asyncgate.commands.profiles import DEFAULT_PROFILE, Connection, StoredProfile
from asyncgate.commands.terminal import escape_text, show_table
from asyncgate.commands.verdicts import print_answer


@click.command()
@click.option("--url", help=f"Where the gate is; default ASYNCGATE_URL, else {DEFAULT_URL}.")
@click.option("--profile", "name", default=DEFAULT_PROFILE, show_default=True, metavar="NAME",
              help="What to call it here.")
@click.option("--plain-http", is_flag=True, help="Send the credential unencrypted, over a network of your own.")
@as_json
def login(url: str | None, name: str, plain_http: bool, as_json: bool) -> None:
    """Keep the address of a gate and a credential for it, so that no command needs either.

    The credential is asked for, or read from standard input where that is no terminal, and tried.  It goes to a file
    that its owner alone can read.  Every command then uses the profile called default, unless ASYNCGATE_URL or
    ASYNCGATE_API_KEY is set; others by --profile NAME or ASYNCGATE_PROFILE.
    """
    try:
        url = root_of(url or os.environ.get("ASYNCGATE_URL") or DEFAULT_URL)
        if not is_private(split_url(url)) and not plain_http:
            raise ValueError(f"{url} is plain HTTP, and everybody on the way could read the credential: use https://, "
                             "or say --plain-http if the network is your own")
        kept = profiles.read_profiles()
    except ValueError as wrong:
        raise exit_with(str(wrong), EXIT_WRONG) from None
    if plain_http:
        os.environ["ASYNCGATE_PLAIN_HTTP"] = "true"
    token = read_credential(url)
    who = check_credential(url, token)
    profiles.write_profiles({**kept, name: StoredProfile(url, token, plain_http)})
    print_answer(as_json, {"profile": name, "url": url, "file": str(profiles.profiles_file()), **who},
        f"{url} lets you in as {who['principal']}, {who['role']}; "
        f"kept as the profile {name} in {profiles.profiles_file()}")


def read_credential(url: str) -> str:
    """Return the credential that the user types, or that is piped in."""
    if sys.stdin.isatty():
        return str(click.prompt(f"Credential for {urlsplit(url).netloc}", hide_input=True, default="",
                                show_default=False, err=True)).strip()
    return sys.stdin.read().strip()


def check_credential(url: str, token: str) -> dict[str, str]:
    """See that a gate lets one in; return who one is there, and in which role."""
    with gate_at(Connection(url, token)) as gate:
        you = gate.call("whoami")
    who = f"{you['principal_kind']} {you['principal_id']}" if you.get("bound") else "whoever a request names"
    return {"principal": escape_text(who), "role": escape_text(str(you["role"]))}


@click.command()
@click.option("--profile", "name", default=DEFAULT_PROFILE, show_default=True, metavar="NAME",
              help="Which one to forget.")
@as_json
def logout(name: str, as_json: bool) -> None:
    """Forget a profile; the credential stays good: `asyncgate revoke-key` ends that of a key."""
    kept = load_profiles()
    if kept.pop(name, None) is None:
        raise exit_with(f"there is no profile {name!r}{profiles.format_others(kept)}", EXIT_NOT_FOUND)
    profiles.write_profiles(kept)
    print_answer(as_json, {"profile": name}, f"the profile {name} is forgotten")


@click.command("profiles")
@as_json
def list_profiles(as_json: bool) -> None:
    """List the gates that one has logged in to; credentials are not shown."""
    rows = [{"profile": name, "url": one.url, "credential": "yes" if one.token else "none"}
            for name, one in sorted(load_profiles().items())]
    if as_json:
        return click.echo(msgspec.json.encode({"profiles": rows}))
    show_table(["profile", "url", "credential"], rows) if rows else click.echo("nothing; `asyncgate login` makes one")


def load_profiles() -> dict[str, StoredProfile]:
    """Return the profiles, or end the program."""
    try:
        return profiles.read_profiles()
    except ValueError as wrong:
        raise exit_with(str(wrong), EXIT_WRONG) from None
