"""What people see while they sign in: plain HTML without a script, in one style.

Security: every text from outside passes `clean`.  Nothing but the page's own style is loaded (its hash is in the
policy), no other page may frame these, and their forms go to the gate alone.  Chromium also holds a form to that list
when its answer redirects, so a page whose form may end at a client lists where that client is.
"""

from __future__ import annotations

import unicodedata
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from urllib.parse import urlsplit

from msgspec import Struct

from asyncgate.extras.oauth.wire import HTML, Answer

MOST_SHOWN_LETTERS = 100        # characters of a text from outside
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}     # control, bidi, unassigned: they can make a name look like
HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-:")

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f5f6f4;
  --sheet: #ffffff;
  --line: #d9dcd6;
  --ink: #1d2226;
  --quiet: #566067;
  --accent: #17604f;
  --on-accent: #ffffff;
  --warning: #7a4b00;
  --warning-ground: #fdf3dd;
  --text: 1rem/1.5 system-ui, sans-serif;
  --small: .875rem;
  --code: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  --round: .5rem;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a;
    --sheet: #1c2024;
    --line: #353b41;
    --ink: #e6e9ea;
    --quiet: #a0aab1;
    --accent: #5cc3a6;
    --on-accent: #0d1f1a;
    --warning: #f0be6b;
    --warning-ground: #34290f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem; background: var(--ground); color: var(--ink); font: var(--text); }
main { max-width: 30rem; margin: 6vh auto; padding: 1.5rem; background: var(--sheet);
  border: 1px solid var(--line); border-radius: var(--round); overflow-wrap: anywhere; }
.gate { margin: 0 0 1rem; color: var(--quiet); font-size: var(--small); }
h1 { margin: 0 0 .75rem; font-size: 1.375rem; line-height: 1.3; }
p, ul, dl { margin: 0 0 1rem; }
ul { padding-left: 1.25rem; }
dl { display: grid; grid-template-columns: auto 1fr; gap: .25rem 1rem; }
dt { color: var(--quiet); }
dd { margin: 0; }
code { font-family: var(--code); font-size: .9375em; }
.quiet { color: var(--quiet); font-size: var(--small); }
.warning { padding: .75rem 1rem; color: var(--warning); background: var(--warning-ground);
  border-radius: var(--round); }
a { color: var(--accent); }
form { margin: 0; }
label { display: block; margin-bottom: .25rem; }
input, button, .button { width: 100%; min-height: 2.75rem; padding: .5rem 1rem; font: inherit;
  border: 1px solid var(--line); border-radius: var(--round); }
input { margin-bottom: .75rem; color: var(--ink); background: var(--ground); font-family: var(--code); }
button, .button { display: block; margin-bottom: .75rem; color: var(--ink); background: none; text-align: center;
  text-decoration: none; cursor: pointer; }
.first { color: var(--on-accent); background: var(--accent); border-color: var(--accent); font-weight: 600; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
hr { margin: 1rem 0; border: 0; border-top: 1px solid var(--line); }
"""
STYLE_HASH = b64encode(sha256(STYLE.encode()).digest()).decode()

IN_WORDS = {        # scopes, in the order of the page
    "tasks:read": "See tasks and their results",
    "tasks:write": "Create, change and cancel tasks",
    "tasks:lease": "Take on tasks and complete them",
    "receipts:read": "Read receipts",
    "receipts:ack": "Acknowledge receipts",
    "metrics:read": "Read the gate's metrics",
    "admin:read": "See everything of the tenant: keys, people, the audit log",
    "admin:write": "Administer the tenant: issue and revoke keys, invite people, change limits",
}


class LoginWay(Struct):
    """One way to sign in."""

    title: str
    path: str


def clean(text: str, most: int = MOST_SHOWN_LETTERS) -> str:
    """Return a text from outside as HTML: cut, escaped, with invisible characters spelled out."""
    shown = text[:most] + ("…" if len(text) > most else "")
    spelled = "".join([f"[U+{ord(letter):04X}]" if unicodedata.category(letter) in INVISIBLE else letter
                       for letter in shown])
    return escape(spelled)


def isolate(text: str) -> str:
    """Return a text from outside as HTML whose direction does not change the text around it."""
    return f"<bdi>{clean(text)}</bdi>"


def show_page(title: str, *parts: str, status: int = 200, form_to: Iterable[str] = (),
              headers: Iterable[tuple[bytes, bytes]] = ()) -> Answer:
    """Answer with a page; `parts` are HTML, `form_to` lists where its forms may lead beside the gate itself."""
    body = "".join(parts)
    text = (f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{clean(title)}</title>'
            f'<style>{STYLE}</style></head><body><main><p class="gate">AsyncGate</p><h1>{clean(title)}</h1>'
            f"{body}</main></body></html>")
    targets = " ".join(["'self'", *form_to])
    policy = (f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; form-action {targets}; frame-ancestors 'none'; "
              "base-uri 'none'")
    # Referrer: the own forms alone tell where they come from.  With no-referrer a browser sends `Origin: null` with
    # them (Fetch 3.2), and the check of the Origin would refuse them.
    return Answer(status, text.encode(), HTML, [
        (b"content-security-policy", policy.encode("ascii")), (b"referrer-policy", b"same-origin"),
        (b"cache-control", b"no-store"), (b"x-frame-options", b"DENY"), *headers])


def list_form_targets(redirect_uri: str) -> list[str]:
    """Return the source of the policy's form-action that a redirect to this URI needs."""
    parts = urlsplit(redirect_uri)
    place = parts.netloc.lower()
    if parts.scheme not in ("http", "https"):
        return [f"{parts.scheme}:"]
    if HOST_CHARACTERS.issuperset(place):
        return [f"{parts.scheme}://{place}"]
    return [f"{parts.scheme}:"]     # a policy cannot name an IPv6 address


def show_error(title: str, message: str, *more: str, status: int = 400,
               headers: Iterable[tuple[bytes, bytes]] = ()) -> Answer:
    """Answer with a page that says what went wrong; `more` is HTML."""
    return show_page(title, f"<p>{clean(message, 500)}</p>", *more, status=status, headers=headers)


def show_link(title: str, path: str, first: bool = False) -> str:
    """Return a link that looks like a button."""
    return f'<a class="button{" first" if first else ""}" href="{escape(path)}">{clean(title)}</a>'


def hide(name: str, value: str) -> str:
    """Return a hidden field of a form."""
    return f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">'


# Pages.


def show_login(client: str, host: str, ways: list[LoginWay], code_form: tuple[str, str] | None, form_to: Iterable[str],
               headers: Iterable[tuple[bytes, bytes]], wrong: str = "", status: int = 200, *, trusted: bool) -> Answer:
    """Answer with the login page; `code_form` is the path for the code of a sign-in link, and the sign-in's id.

    Nobody is asked about a `trusted` client, nor twice about the same, so the page promises no question then.
    """
    next_step = ("It is trusted here, and may act for you as soon as you have signed in." if trusted else
                 "Unless you have allowed it before, you then see what it may do, and decide.")
    about = f"<p>{isolate(client)} at <code>{clean(host)}</code> asks you to sign in. {next_step}</p>"
    buttons = [show_link(f"Continue with {way.title}", way.path, first=not at) for at, way in enumerate(ways)]
    neither = "<p>There is no way to sign in. An administrator adds an identity provider, or makes a sign-in link.</p>"
    form = make_code_form(*code_form, between=bool(ways), wrong=wrong) if code_form else "" if ways else neither
    return show_page("Sign in", about, *buttons, form, form_to=form_to, headers=headers, status=status)


def make_code_form(path: str, sign_in: str, *, between: bool, wrong: str) -> str:
    """Return the form that takes the code of a sign-in link."""
    warning = f'<p class="warning" role="alert">{clean(wrong, 500)}</p>' if wrong else ""
    return (f'{"<hr>" if between else ""}{warning}<form method="post" action="{escape(path)}">'
            f'{hide("sign_in", sign_in)}<label for="code">Code of a sign-in link</label><input id="code" name="code" '
            'autocomplete="one-time-code" autocapitalize="characters" spellcheck="false" required maxlength="60">'
            '<button>Sign in with the code</button></form>'
            '<p class="quiet">An administrator makes one with <code>asyncgate login-link</code>.</p>')


def show_sign_in_link(path: str, code: str, sign_in: str, client: str, form_to: Iterable[str]) -> Answer:
    """Answer with the page of a sign-in link: a button, because the previews of chats open links, too."""
    return show_page(
        "Sign in", f"<p>This link signs you in to {isolate(client)}. It works once.</p>",
        f'<form method="post" action="{escape(path)}">{hide("sign_in", sign_in)}{hide("code", code)}'
        '<button class="first">Sign in</button></form>', form_to=form_to)


class ConsentRequest(Struct, kw_only=True):
    """What the consent page asks."""

    client: str                    # its name, which it has chosen itself
    host: str                       # where the browser goes afterwards
    document_host: str | None       # whose document names the client; None: an administrator or the client itself
    local: bool                     # whether the browser goes to a client on the person's machine
    person: str
    tenant: str
    principal: str
    role: str
    scopes: frozenset[str]
    path: str                       # of the form
    again: str                      # of "not you?"
    fields: dict[str, str]          # of the form
    form_to: list[str]


def show_consent(ask: ConsentRequest) -> Answer:
    """Answer with the page that asks whether a client may act for a person."""
    words = [text for scope, text in IN_WORDS.items() if scope in ask.scopes]
    words += sorted(ask.scopes - IN_WORDS.keys())
    source = (f"<dt>Published by</dt><dd><code>{clean(ask.document_host)}</code></dd>" if ask.document_host else "")
    local = ('<p class="warning">The answer goes to a client on this machine. Allow it only if you have just started '
             "this sign-in yourself: any client here could have asked.</p>" if ask.local else "")
    return show_page(
        f"Allow {ask.client}?",
        f"<p>You are {isolate(ask.person)}, in tenant {isolate(ask.tenant)}. "
        f'<a href="{escape(ask.again)}">Not you?</a></p>',
        f"<dl><dt>Client</dt><dd>{isolate(ask.client)}</dd>{source}"
        f"<dt>Goes back to</dt><dd><code>{clean(ask.host)}</code></dd>"
        f"<dt>Acts as</dt><dd>{isolate(ask.principal)}, {clean(ask.role)}</dd></dl>",
        local, "<p>It may:</p><ul>", *(f"<li>{clean(text)}</li>" for text in words), "</ul>",
        f'<form method="post" action="{escape(ask.path)}">',
        *(hide(name, value) for name, value in ask.fields.items()),
        '<button class="first" name="answer" value="allow">Allow</button>'
        '<button name="answer" value="deny">Deny</button></form>',
        '<p class="quiet">The client chose its name itself. Trust the addresses.</p>',
        form_to=ask.form_to)
