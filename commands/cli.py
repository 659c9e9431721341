"""The commands that call a gate, generated one per operation from the table, and the tools around a gate.

`calling` defines the exit statuses, `terminal` the output.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, closing, suppress
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import NODEFAULT, inspect
from msgspec.structs import replace

from asyncgate import FENCES_SKIPPED, Operation, __version__, backends
from asyncgate.clients.http import DEFAULT_URL
from asyncgate.commands import calling, terminal, verdicts, watching
from asyncgate.commands.new_file import hold_new_file
from asyncgate.commands.profiles import Connection
from asyncgate.commands.read_only import open_for_reading
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.extras import find_extras
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.screening import mark_spoilt
from asyncgate.parts.model.settings import Configured, list_values, load_settings, mask_credentials
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.options import add_settings_options

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.commands.copy import CopyStore, Tallies
from asyncgate.parts.process.logs import start_logging

SECTIONS = {
    "Get started": ("demo", "dev", "new"),
    "Documentation": ("docs", "skill"),
    "Run a gate": ("serve", "ledger", "mcp", "keys", "migrate", "config", "openapi"),
    "Use a gate": ("login", "logout", "profiles", "login-link", "wait", "tail", "top", "inbox", "answer", "bulk",
                   "usage"),
    "Do the work": ("worker", "scheduler", "relay", "permission-prompt"),
    "Maintain a gate": ("doctor", "receipts", "archive", "export", "verify", "reconcile", "rebuild", "backup",
                        "restore", "copy", "clean-payloads", "conformance", "torture", "bench", "bench-server"),
}


# Commands in other modules, imported on demand; some of these modules import this one.
MODULES = {"archive": "commands.archive", "export": "commands.export", "keys": "commands.keys",
           "receipts": "commands.receipts", "restore": "commands.restore", "login": "commands.login",
           "logout": "commands.login", "profiles": "commands.login", "login-link": "commands.login_link",
           "wait": "commands.follow", "tail": "commands.tail", "top": "commands.top", "bulk": "commands.bulk",
           "usage": "commands.usage", "torture": "commands.torture",
           "bench": "commands.bench.command", "bench-server": "commands.bench.command",
           "docs": "commands.docs", "skill": "commands.skill"}
MODULES = {name: f"asyncgate.{module}" for name, module in MODULES.items()} | {
    name: module for extra in find_extras().values() for name, module in extra.commands.items() if " " not in name}


class Clients(calling.CommandGroup):
    """A group that also finds commands by the names of the operations, with underscores."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of all commands."""
        return sorted([*super().list_commands(ctx), *MODULES, *(name.replace("_", "-") for name in OPERATIONS)])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Find a command by its name."""
        if name in MODULES:
            part = import_module(MODULES[name])
            command: click.Command = getattr(part, "list_profiles" if name == "profiles" else name.replace("-", "_"))
            return command
        if (op := OPERATIONS.get(name.replace("-", "_"))) is not None:
            return make_command(op)
        return super().get_command(ctx, name.replace("_", "-"))


commands = Clients("clients")


def write_sections(group: click.Group, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the list of commands in sections: the tools by purpose, then the operations."""
    tools = [name for names in SECTIONS.values() for name in names]
    others = [name for name in group.list_commands(ctx) if name not in tools]
    operations = [name for name in others if name.replace("-", "_") in OPERATIONS]
    more = [name for name in others if name not in operations]
    wide = max(map(len, [*tools, *others]))
    calls = f"Operations (call the gate at --url, ASYNCGATE_URL or {DEFAULT_URL})"
    for title, names in {**SECTIONS, "More": more, calls: operations}.items():
        rows = [(name, command) for name in names if (command := group.get_command(ctx, name))]
        if rows:
            with formatter.section(title):
                formatter.write_dl([(f"{name:{wide}}", calling.shorten_help(command, formatter.width - wide - 6))
                                    for name, command in rows])
    formatter.write_paragraph()
    formatter.write_text(calling.EXIT_STATUS)


# From the field of a request to an option.


class JsonValue(click.ParamType[msgspec.Raw]):
    """A JSON value: inline, from a file as @file.json, or from standard input as -."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> msgspec.Raw:
        """Return the text unchanged, after a check that it is JSON."""
        text = self._text(str(value), param, ctx)
        try:
            msgspec.json.decode(mark_spoilt(text))      # a string that cannot be stored is refused with its item only
        except (ValueError, RecursionError) as wrong:
            quoted = "" if value == "-" or value.startswith("@") else "; a string needs quotes: '\"text\"'"
            self.fail(f"this is not JSON: {wrong}{quoted if text.strip()[:1] not in b'{[' else ''}", param, ctx)
        return msgspec.Raw(text)

    def _text(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if value == "-":
            return sys.stdin.buffer.read()
        try:
            if not value.startswith("@"):
                return value.encode()
            with open(value[1:], "rb") as file:
                return file.read()
        except OSError as error:
            return self.fail(f"{value[1:]!r} cannot be read: {error.strerror}", param, ctx)
        except UnicodeEncodeError:
            return self.fail(f"this JSON {calling.NO_UTF8}", param, ctx)


JSON = JsonValue()


class OptionForm(msgspec.Struct):
    """The properties of a field as an option: its type, whether it repeats, and its description."""

    type: click.ParamType[Any] = JSON
    repeats: bool = False
    says: str = ""


SCALARS: list[tuple[type[inspect.Type], click.ParamType[Any]]] = [
    (inspect.IntType, click.INT), (inspect.FloatType, click.FLOAT), (inspect.BoolType, click.BOOL),
    (inspect.StrType, click.STRING)]


# Fields that compare with what has happened: in these, 1h is an hour ago.
FILTERS_BY_TIME = re.compile("(created|ended|issued)_(after|before)|since")


def find_form(kind: inspect.Type) -> OptionForm:
    """Return the form of an option for a field of this type."""
    if isinstance(kind, inspect.Metadata):
        inner, described = find_form(kind.type), (kind.extra_json_schema or {}).get("description", "")
        # how it is written
        form = inner.says if inner.repeats or inner.type is calling.MOMENT or not described else ""
        return OptionForm(inner.type, inner.repeats, "; ".join(filter(None, [described, form])))
    if isinstance(kind, inspect.UnionType):
        return next(find_form(type_) for type_ in kind.types if not isinstance(type_, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        return OptionForm(click.Choice([str(value) for value in kind.values]))
    if isinstance(kind, inspect.FrozenSetType | inspect.ListType) and find_form(kind.item_type).type is click.STRING:
        return OptionForm(click.STRING, repeats=True, says="comma-separated, or repeat the option")
    if isinstance(kind, inspect.DateTimeType):
        return OptionForm(calling.MOMENT, says="a date such as 2026-12-31, a time, or a duration from now such as 90d")
    if isinstance(kind, inspect.StructType):
        return OptionForm(says=f"an object with {', '.join(field.encode_name for field in kind.fields)}")
    return OptionForm(next((type for of, type in SCALARS if isinstance(kind, of)), JSON))


def list_fields(takes: type[wire.Ask]) -> dict[str, inspect.Field]:
    """Return the fields of a request by name: required ones first, those that name the caller last."""
    info = inspect.type_info(takes)
    assert isinstance(info, inspect.StructType)
    fields = {field.name: field for field in info.fields}
    return dict(sorted(fields.items(),
                       key=lambda item: (wire.names_caller(takes, item[0]), not is_needed(takes, item[1]))))


def is_needed(takes: type[wire.Ask], field: inspect.Field) -> bool:
    """Whether a request requires this field."""
    return field.required or field.name in takes.needed


def make_option(op: Operation, field: inspect.Field) -> click.Parameter:
    """Make the option of a field; the first required field becomes an argument."""
    known = find_form(field.type)
    if field.name.endswith(("task_id", "receipt_id", "schedule_id")):
        known.type = calling.ID_TYPE
    if field.name.endswith("_seconds"):
        known.type = calling.DURATION
    if known.type is calling.MOMENT and FILTERS_BY_TIME.fullmatch(field.name):
        known = OptionForm(calling.PAST, says=known.says.replace("from now", "back from now"))
    if field.name in op.takes.needed[:1]:
        return click.Argument([field.name], type=known.type, required=False, metavar=field.name.upper())
    name = "--" + field.name.replace("_", "-")
    if (op.name, field.name) == ("run_task", "wait_seconds"):
        known.says = "longest time to wait for the end, such as 10m"
    says = [known.says, "required" if is_needed(op.takes, field) else "",
            f"default {field.default}" if field.default not in (NODEFAULT, None, "", 0.0, frozenset()) else ""]
    declared = f"{name}/--no-{name[2:]}" if known.type is click.BOOL else name
    metavar = "JSON" if known.type is JSON else None
    return click.Option([declared, field.name], type=None if known.type is click.BOOL else known.type, default=None,
                        multiple=known.repeats, metavar=metavar, help="; ".join(filter(None, says)))


def make_tenant_options(op: Operation) -> list[click.Parameter]:
    """Accept the tenant of an operation both as an argument and as --tenant."""
    if op.takes.needed[:1] == ("tenant",):
        return [click.Option(["--tenant", "whose"], help="the same as TENANT")]
    alone = {*op.takes.__struct_fields__} - {*wire.Ask.__struct_fields__} == {"tenant"}
    return [click.Argument(["whose"], required=False, metavar="TENANT")] if alone else []


def split_names(values: Iterable[str]) -> list[str]:
    """Return the names of a repeatable option, whose values may be comma-separated."""
    return [name for value in values for name in map(str.strip, value.split(",")) if name]


CONNECTION = [
    click.Option(["--data"], type=JSON, metavar="JSON",
                 help="The whole request as a JSON object; options override its fields."),
    *calling.GATE,
    click.Option(["--json", "as_json"], is_flag=True, help="Print the gate's reply as JSON."),
]


class OperationCommand(click.Command):
    """The command of one operation; its help groups the options by purpose."""

    def __init__(self, op: Operation, **more: Any) -> None:
        super().__init__(op.name.replace("_", "-"), **more)
        self.takes = op.takes

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        shown = [(self._section(param), record) for param in self.get_params(ctx)
                 if isinstance(param, click.Option) and (record := param.get_help_record(ctx))]
        for title, records in groupby(shown, lambda pair: pair[0]):
            with formatter.section(title):
                formatter.write_dl([record for _, record in records])
        formatter.write_paragraph()
        formatter.write_text("JSON is given inline, as @file.json, or as - for standard input.")

    def _section(self, param: click.Parameter) -> str:
        if param in (*CONNECTION, watching.WATCH) or param.is_eager:
            return "Options"
        is_caller = wire.names_caller(self.takes, param.name or "")
        return "Caller, if the credential does not name one" if is_caller else "Fields"


@cache      # made when it is asked for: to make all of them takes longer than most commands do
def make_command(op: Operation) -> click.Command:
    """Make the command of an operation."""
    fields = list_fields(op.takes)

    def run(url: str | None, token: str | None, profile: str | None, as_json: bool, data: msgspec.Raw | None,
            every_seconds: float | None = None, **given: Any) -> None:
        if whose := given.pop("whose", None):
            given["tenant"] = given.get("tenant") or whose
        arguments = {name: split_names(value) if isinstance(value, tuple) else value for name, value in given.items()
                     if value not in (None, (), "")}
        body = {**read_data(op, fields, data), **arguments}
        require_fields(op, body)
        at = calling.find_connection(profile, url, token)
        if every_seconds is not None:
            return watching.watch_list(op, at, body, every_seconds, as_json)
        if op.name == "run_task":
            from asyncgate.commands.follow import run_task
            sys.exit(run_task(at, body, as_json))
        with calling.connect_to_gate(at) as gate:
            reply = gate.send(op.name, body).content
        click.echo(reply) if as_json else print_reply(op, msgspec.json.decode(reply))

    params = [*(make_option(op, field) for field in fields.values()), *make_tenant_options(op), *CONNECTION,
              *([watching.WATCH] if op.kind == "R" and op.columns else [])]
    summary, text = remove_clause_numbers(op.summary), remove_clause_numbers(op.text.strip())
    return OperationCommand(op, callback=run, params=params, short_help=summary.rstrip("."),
                            help=f"{summary}\n\n{text}\n\n{MORE_HELP.get(op.name, '')}".strip())


def require_fields(op: Operation, body: Mapping[str, Any]) -> None:
    """Refuse a body that lacks what the operation needs."""
    for name, field in list_fields(op.takes).items():
        if is_needed(op.takes, field) and name not in body:
            spelled = name.upper() if name in op.takes.needed[:1] else "--" + name.replace("_", "-")
            raise click.UsageError(f"{op.name} needs {spelled}")


MORE_HELP = {"run_task": """This command prints the id at once, and shows the progress of the task for up to
--wait-seconds.  After Ctrl-C, `asyncgate wait TASK` continues.

Exit status: 0 succeeded, 8 failed, 9 canceled, 10 not ended."""}


def read_data(op: Operation, fields: Mapping[str, inspect.Field], data: msgspec.Raw | None) -> dict[str, Any]:
    """Split the object of --data into fields; JSON that the gate stores stays unchanged."""
    if data is None:
        return {}
    try:
        parts = msgspec.json.decode(mark_spoilt(bytes(data)), type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise click.BadParameter("it must be a JSON object", param_hint="'--data'") from None
    if unknown := [name for name in parts if name not in fields]:
        raise click.BadParameter(f"{op.name} has no field {unknown[0]!r}", param_hint="'--data'")
    return {name: part if find_form(fields[name].type).type is JSON else msgspec.json.decode(part)
            for name, part in parts.items()}


# Print replies.

SEAL_DIGITS = 64        # of SHA-256


def print_reply(op: Operation, reply: dict[str, Any]) -> None:
    """Print a reply: a list as a table, anything else as names and values; its warnings on stderr."""
    for text in reply.pop("warnings", None) or ():
        click.echo(f"warning: {terminal.escape_text(text)}", err=True)
    rows = next((value for value in reply.values() if isinstance(value, list)), None) if op.columns else None
    if rows is None:
        return terminal.show_block(reply)
    terminal.show_table(op.columns, rows) if rows else click.echo("nothing")
    print_hints(op, reply)


SHOWN_OTHERWISE = ("next_cursor", "cursor", "total", "at_least", "as_of", "task_id")   # or asked for
GROWING = ("get_task_history", "list_audit")      # lists to which time adds at the end, so that one can go on there


def print_hints(op: Operation, reply: dict[str, Any]) -> None:
    """Print on stderr what else a reply says, and the option for the next page, or for what comes or changes later."""
    for name, value in reply.items():
        if isinstance(value, str | int | float) and name not in SHOWN_OTHERWISE:
            click.echo(f"{name}: {terminal.format_cell(value, shows_false=True)}", err=True)
    if (total := reply.get("total")) is not None:
        click.echo(f"{'at least ' * reply['at_least']}{total} in all", err=True)
    if more := reply.get("next_cursor"):
        click.echo(f"next page: --cursor {more}", err=True)
    elif (cursor := reply.get("cursor")) and ("since_receipt_id" in op.reader.fields or op.name in GROWING):
        since = "since-receipt-id" if "since_receipt_id" in op.reader.fields else "cursor"
        click.echo(f"later entries: --{since} {cursor}", err=True)
    if moment := reply.get("as_of"):
        click.echo(f"later changes: --changed-since {moment}", err=True)


# The tools around a gate.


@commands.command()
@click.option("--port", metavar="NUMBER", help="Port to listen on; default 8080, 0 for any free port.")
@click.option("--no-worker", is_flag=True, help="Do not start the echo worker.")
@add_settings_options
def dev(configured: Configured, no_worker: bool) -> None:
    """Run a gate for development: no credential, this machine only, with an echo worker.

    It stores everything in ./asyncgate-dev.db unless --database names another database.  Ctrl-C stops it.
    """
    from asyncgate.commands.dev import run_dev
    sys.exit(run_dev(configured, worker=not no_worker))


@commands.command(params=[*calling.GATE])
@click.option("--agent", metavar="ID", help="The calling agent; then no call may name another principal.")
@click.option("--underscores", is_flag=True, help="Name tools with underscores, for hosts that do not allow dots.")
@click.option("--tools", default="", metavar="SETS", help="List these sets of tools: delegate,work,admin,more or all.")
@click.option("--patience", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS",
              help="How long to wait for a gate that does not answer now.")
@add_settings_options
def mcp(configured: Configured, url: str | None, token: str | None, profile: str | None, agent: str | None,
        underscores: bool, tools: str, patience: float) -> None:
    """Serve MCP on standard input and output, for hosts that start a program: Claude Desktop and others.

    With --url it connects to a running gate; with --database it is itself a gate, for this host only.
    """
    from asyncgate.commands import mcp_stdio as stdio
    own = configured.origins["database.url"].startswith("flag")
    if own and (url or token or profile):
        raise click.UsageError("give --url for a running gate, or --database for a new one, not both")
    start_logging(configured.settings)
    path = stdio.make_path(agent, underscores, tools)
    try:
        at = Connection(None, None) if own else calling.find_connection(profile, url, token)
        asyncio.run(stdio.serve_embedded(configured.settings, path) if own else
                    stdio.serve_running(*at, path, patience))
    except ValueError as wrong:
        raise calling.exit_with(str(wrong), calling.EXIT_WRONG) from None
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)     # the host has closed the pipe


@commands.command()
@click.option("--keep", is_flag=True, help="Keep the database and the server's log, and print their folder.")
@click.option("--console", is_flag=True, help="Then leave the gate open, to look at it in a browser, until Ctrl-C.")
def demo(keep: bool, console: bool) -> None:
    """Watch an agent's work survive a killed worker: real processes, a real database, about ten seconds."""
    from asyncgate.commands.demo import run_demo
    sys.exit(run_demo(keep=keep, console=console))


class PassingCommand(click.Command):
    """A command that passes on the arguments after --."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the arguments at --."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["passed"] = args[at + 1:]
        return super().parse_args(ctx, args[:at])


@commands.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--language", type=click.Choice(["python", "typescript"]), default="python", show_default=True,
              help="What the files are written in.")
def new(folder: str, language: str) -> None:
    """Write a first worker and a first agent into a folder."""
    from asyncgate.commands.new import make_files
    click.echo(make_files(folder, language, __version__), nl=False)


@commands.command(cls=PassingCommand, epilog="Example: asyncgate worker --type ocr.page -- ./ocr.sh")
@click.argument("what", metavar="[echo] [sleep_then_return] [http_get] | -- PROGRAM", nargs=-1)
@click.option("--ai", "profile_file", metavar="FILE",
              help="Use a language model with tools; FILE is its profile.")
@click.option("--a2a", "card_url", metavar="URL",
              help="Hand the tasks to the A2A agent with this card; ASYNCGATE_A2A_KEY is its credential.")
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Type of task to lease; repeatable.")
@click.option("--worker-id", metavar="ID", help="Id of the worker; default the key's principal, else the host name.")
@click.option("--worker-kind", metavar="KIND", help="Kind of the key's principal, if it is not worker.")
@click.option("--capabilities", "--capability", "capabilities", multiple=True, metavar="NAME,…",
              callback=lambda ctx, param, given: split_names(given), help="Capability of the worker; repeatable.")
@click.option("--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True, help="Tasks to run at once.")
@click.option("--ttl", "ttl_seconds", type=calling.Duration(1), default=30, show_default="30s",
              help="How long a task waits if its worker dies; the worker renews its leases at a third of that.")
@click.option("--drain", "drain_seconds", type=calling.DURATION, default=20.0, show_default="20s",
              help="Time for running tasks to end after SIGTERM.")
@click.option("--state", type=click.Path(file_okay=False), help="Folder for state that survives restarts.")
@click.option("--forget", is_flag=True, help="Store nothing on disk: no dead letters, a new instance id at each start.")
@click.option("--allow", multiple=True, metavar="HOST", help="http_get, --a2a: private host or network to allow.")
@click.option("--plain-http", is_flag=True, help="http_get, --a2a: allow http:// as well as https://.")
@click.option("--timeout", "timeout_seconds", type=calling.Duration(0.001), default=30.0, show_default="30s",
              help="http_get, --a2a: timeout of a request.")
@click.option("--no-tracebacks", "tracebacks", is_flag=True, flag_value=False, default=True,
              help="Do not keep where in the code an error was raised.")
@click.option("--keep-logs", is_flag=True, flag_value=logging.INFO, default=None,
              help="Keep with each task what its program writes to standard error; read-output shows it.")
@click.option("--watch", "folder", is_flag=False, flag_value=".", metavar="[FOLDER]",
              help="PROGRAM is itself a worker: start it again when code in the folder changes; default here.")
@click.option("--lifeline", "quiet", is_flag=True, hidden=True)
@calling.add_gate_options
@click.pass_context
def worker(ctx: click.Context, /, at: Connection, what: tuple[str, ...], profile_file: str | None,
           card_url: str | None, forget: bool, quiet: bool, folder: str | None, **about: Any) -> None:
    """Run a worker: built-in task types, a program called for each task, a language model, or an agent of A2A.

    A program reads the payload as JSON from standard input, and ASYNCGATE_TASK_ID, ASYNCGATE_ATTEMPT and others from
    its environment.  Its standard output is the result, JSON or text.  Each line on file descriptor 3 is progress; an
    object with a member "checkpoint" is passed as ASYNCGATE_CHECKPOINT if the task is retried.

    Exit status 0 completes the task, 75 or a signal retries it, any other status fails it with the end of standard
    error as the message.  If the lease is lost, the process group gets SIGTERM, and SIGKILL five seconds later.
    """
    from asyncgate.clients.worker import program as part
    command = ctx.meta["passed"]
    if unknown := [name for name in what if name not in part.BUILT_IN_TASKS]:
        raise click.UsageError(f"{unknown[0]!r} is not one of {', '.join(part.BUILT_IN_TASKS)}; put a program after --")
    if folder is not None:
        if not command or what or profile_file or card_url or about["types"]:
            raise click.UsageError("--watch takes a program that is itself a worker: --watch -- python3 worker.py")
        from asyncgate.commands.reloading import run_reloaded
        return run_reloaded(command, folder, at, about["drain_seconds"])
    if len(what) > 1 and about["types"]:
        raise click.UsageError("--type gives other names to one task; start a worker for each")
    about |= {"url": at.url, "token": at.token}
    if [bool(way) for way in (what, command, profile_file, card_url)].count(True) != 1 or (
            (command or card_url) and not about["types"]):
        raise click.UsageError("name the tasks: echo, sleep_then_return, http_get, --ai FILE, "
                               "--type TYPE --a2a URL, or --type TYPE -- PROGRAM")
    if quiet:
        from asyncgate.commands.dev import watch_lifeline
        watch_lifeline()
    if forget or about["state"]:
        about["state"] = None if forget else about["state"]
    else:
        del about["state"]
    try:
        with calling.exit_on_refusal():
            if profile_file:
                for of_http_get in ("allow", "plain_http", "timeout_seconds"):
                    del about[of_http_get]
                try:
                    from asyncgate.extras.ai_worker.command import run_ai_worker
                except ModuleNotFoundError:
                    raise click.UsageError("--ai needs the extra ai_worker, which this installation lacks") from None
                run_ai_worker(profile_file, quiet=quiet, **about)
            elif card_url:
                try:
                    from asyncgate.extras.a2a_worker.command import run_a2a_worker
                except ModuleNotFoundError:
                    raise click.UsageError("--a2a needs the extra a2a_worker, which this installation lacks") from None
                run_a2a_worker(card_url, quiet=quiet, **about)
            else:
                part.run_worker(what, command, quiet=quiet, **about)
    except OSError as wrong:
        raise click.ClickException(str(wrong)) from None


@commands.command(cls=PassingCommand, options_metavar="",
                  epilog="Example: asyncgate conformance sqlite: -- -k lease -x")
@click.argument("urls", metavar="[URL]... [-- PYTEST ARGUMENTS]", nargs=-1)
@click.pass_context
def conformance(ctx: click.Context, urls: tuple[str, ...]) -> None:
    """Run the conformance suite of backends on the given database URLs."""
    from asyncgate.conformance.run import run
    sys.exit(run(urls, ctx.meta["passed"]))


@commands.command()
@click.option("--print-sql", is_flag=True, help="Print the SQL instead of running it; needs no connection.")
@click.option("--after", type=int, default=0, metavar="NUMBER",
              help="With --print-sql: only migrations after this number.")
@calling.as_json
@add_settings_options
def migrate(configured: Configured, print_sql: bool, after: int, as_json: bool) -> None:
    """Create the database or bring its schema up to date.

    On SQLite `serve` does this too.  On Postgres run it as a superuser, or as the database's owner with CREATEROLE,
    before new servers start; servers of the previous release keep running meanwhile.
    """
    database = configured.settings.database
    if print_sql:
        script = backends.migration_sql(database.url, after)
        return click.echo(script, nl=False) if script else click.echo(f"there is no migration after {after}", err=True)
    done = asyncio.run(backends.migrate(database.url, database))
    lines = (f"applied {name}" if name.endswith(".sql") else f"recreated {name}" for name in done)
    print_answer(as_json, {"applied": done}, *lines, "the schema is up to date")


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@add_settings_options
def config(configured: Configured, as_json: bool) -> None:
    """Print every setting with its value (secrets masked) and its origin."""
    rows = list_values(configured)
    if as_json:
        listed = [{"name": name, "value": value, "from": origin} for name, value, origin in rows]
        return click.echo(msgspec.json.encode(listed))
    wide = max(len(name) for name, _, _ in rows)
    for name, value, origin in rows:
        click.echo(f"{name:{wide}}  {value}  ({origin})")


@commands.command()
def openapi() -> None:
    """Print the OpenAPI document of the REST interface."""
    from asyncgate.parts.faces.lease_protocol import LEASE_PROTOCOL
    from asyncgate.parts.faces.openapi import build_document
    from asyncgate.parts.faces.stream import STREAM
    click.echo(build_document((*OPERATIONS.values(), *LEASE_PROTOCOL, STREAM), __version__))


def check_seals(ctx: click.Context, param: click.Parameter, seals: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each given seal is complete: a part of a hash proves nothing."""
    for seal in seals:
        number, _, digest = seal.partition(":")
        if not number.isdecimal() or not re.fullmatch(r"[0-9a-f]*", digest):
            raise click.BadParameter(f"{seal!r} is not a seal: use NUMBER:HASH, as `asyncgate seal-receipts` prints it")
        if len(digest) != SEAL_DIGITS:
            raise click.BadParameter(f"the hash of seal {number} must have {SEAL_DIGITS} digits; {digest!r} has "
                                     f"{len(digest)}")
    return seals


@commands.command()
@click.option("--ledger", is_flag=True, help="Also check every receipt against its seal.")
@click.option("--seal", "anchors", metavar="NUMBER:HASH", multiple=True, callback=check_seals,
              help="With --ledger: a seal recorded elsewhere, with its full hash; repeatable.")
@calling.as_json
@add_settings_options
def verify(configured: Configured, ledger: bool, anchors: tuple[str, ...], as_json: bool) -> None:
    """Verify the database of a gate; the server may keep running.

    Checks that receipts match the states of their tasks, that open obligations match the receipts, that created =
    discharged + open, and that no line of the audit log was changed, moved or removed.  With --ledger also that no
    sealed receipt was changed, added or removed; a seal recorded elsewhere proves that the chain was not rewritten.
    Exit status 1 if a check fails.
    """
    url = require_database(configured.settings.database.url)
    with open_for_reading(url) as readable:
        verdict = asyncio.run(verdicts.verify_url(readable, configured.settings.database))
        if not (ledger or anchors):
            sys.exit(verdicts.print_verdict(verdict, mask_credentials(url), as_json))
        if not as_json:
            verdicts.print_verdict(verdict, mask_credentials(url))
        from asyncgate.commands import verify_ledger as part
        report = asyncio.run(part.verify_seals(readable, configured.settings, anchors))
    if as_json:
        verdicts.print_verdict(verdict, mask_credentials(url), as_json, ledger=part.make_seal_report(report))
    else:
        part.print_seal_report(report, mask_credentials(url))
    sys.exit(calling.EXIT_BROKEN if verdict.problems or report.problems else 0)


def require_database(url: str, hint: str = "--database names another") -> str:
    """Return the URL if its database exists; opening it would create a missing one, and fill an empty file."""
    path = url.removeprefix("sqlite:///")
    if not database_exists(url):
        raise errors.StartupError(f"there is no database at {path}; {hint}")
    if os.path.isfile(path) and os.path.getsize(path) == 0:     # such as a copy for which a disk had no room
        raise errors.StartupError(f"{path} is an empty file, not a database; {hint}")
    return url


def database_exists(url: str) -> bool:
    """Whether a database exists, as far as its URL tells."""
    path = url.removeprefix("sqlite:///")
    return path in (url, ":memory:") or os.path.exists(path)


@commands.command()
@click.argument("target", type=click.Path(dir_okay=False))
@calling.as_json
@add_settings_options
def backup(configured: Configured, target: str, as_json: bool) -> None:
    """Copy the database of a gate to a new file, and verify the copy; the server may keep running."""
    url = require_database(configured.settings.database.url)
    with calling.exit_on_error(f"cannot write {target}.partial", interrupted="run the same command again"), (
            hold_new_file(target)):
        verdict = copy_file(url, target, f"{os.path.abspath(target)}.partial")
    size = os.path.getsize(target)
    if as_json:
        sys.exit(verdicts.print_verdict(verdict, target, as_json, bytes=size))
    sys.exit(verdicts.print_verdict(verdict, f"{target} ({size:,} bytes)"))


def copy_file(url: str, target: str, partial: str) -> Any:
    """Copy to a file beside the target, verify it, then rename it, so that an existing target is complete."""
    remove_dead_copy(partial)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        click.echo(f"copying {mask_credentials(url)}", err=True)
        with open_for_reading(url) as readable:
            asyncio.run(copy_backend(readable, partial))
        verdict = asyncio.run(verdicts.verify_url(f"sqlite:///{partial}"))
        os.link(partial, target)
        return verdict
    except OSError as error:
        raise click.ClickException(f"the backup failed and was removed: {error.strerror or error}") from None
    finally:
        remove_files(partial, f"{partial}-wal", f"{partial}-shm")


def remove_dead_copy(partial: str) -> None:
    """Remove what a killed backup has left; its lock is free, so nobody writes it any more."""
    if not os.path.lexists(partial):
        return
    if os.path.islink(partial) or not os.path.isfile(partial) or not is_empty_or_database(partial):
        raise calling.exit_with(f"{partial} is not what a backup leaves; move it away, or name another file",
                                calling.EXIT_CONFLICT)
    remove_files(partial, f"{partial}-wal", f"{partial}-shm", f"{partial}-journal")


def is_empty_or_database(path: str) -> bool:
    """Whether a file has nothing in it, or a database of SQLite."""
    with open(path, "rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


async def copy_backend(url: str, target: str) -> None:
    """Let the backend copy its database, if it can."""
    backend = await backends.open_backend(url)
    try:
        source = backend
        if not isinstance(source, FileBackend):
            raise click.ClickException(f"the backend {url.partition(':')[0]} does not support backup; use the "
                                       "database's own tools")
        with closing(terminal.Bar("copying", "pages")) as bar:
            await source.backup(target, bar.reach)
    finally:
        await backend.close()


@commands.command("copy")
@click.argument("source")
@click.argument("target")
@click.option("--dry-run", is_flag=True, help="Write nothing; count the rows and the missing ones.")
@calling.as_json
def copy_gate(source: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Copy a whole gate into another database, and verify that it is complete.

    SOURCE and TARGET are database URLs, such as sqlite:///gate.db; for Postgres not the URL of a PgBouncer.  Stop the
    gate first: a database in use is refused.  The target must be empty (on Postgres: as created by `asyncgate
    migrate`), or contain a part of this copy: after an interruption, the same command resumes.  Serve the target only
    after exit status 0.

    Everything is copied: tasks, leases, progress, receipts with their delivery times, open obligations, events,
    schedules, presences, and the key that signs cursors.  Leases and cursors stay valid.

    One thing changes: the fence of each unfinished task is raised by 1,000, recorded by an event task.moved.  If the
    old gate is started by mistake, the next lease of the new gate outranks its leases.

    The source is only read.  Exit status 5: the target is in use; nothing was overwritten.
    """
    with calling.exit_on_error():
        sys.exit(asyncio.run(run_copy(source, target, dry_run, as_json)))


async def run_copy(source: str, target: str, dry_run: bool, as_json: bool) -> int:
    """Open both databases, refuse one that a gate serves, and copy; return the exit status."""
    if identify_database(source) == identify_database(target):
        raise errors.StartupError("source and target are the same database")
    async with AsyncExitStack() as opened:
        there = require_database(source, "SOURCE must be an existing gate")
        old = await open_alone(opened, "source", opened.enter_context(open_for_reading(there)))
        new = await open_alone(opened, "target", "memory:" if dry_run and not database_exists(target) else target)
        if not dry_run:
            return await write_and_prove(old, new, mask_credentials(target), as_json)
        tallies = await survey(old, new)
    print_tallies(tallies, as_json, "source", "target", "missing")
    return 0


async def survey(old: CopyStore, new: Backend) -> Tallies:
    """Count the rows of both sides, with a progress bar."""
    from asyncgate.commands import copy as part
    with closing(terminal.Bar("comparing", total=await verdicts.count_rows(old, [*part.COPIED_TABLES]))) as bar:
        return await part.traverse(old, new, bar.add)


async def write_and_prove(old: CopyStore, new: Backend, target: str, as_json: bool = False,
                          more: Callable[[], Mapping[str, Any]] = dict) -> int:
    """Write the rows that the target lacks, and prove that it has them all; return the exit status.

    `more` returns further members of the JSON answer; it is called at the end.
    """
    from asyncgate.commands import copy as part
    tallies = await survey(old, new)
    rows = sum(tally.source for tally in tallies.values())
    if any(tally.missing for tally in tallies.values()):
        with closing(terminal.Bar("copying", total=rows)) as bar:
            await part.traverse(old, new, bar.add, write=True)
    with closing(terminal.Bar("comparing", total=rows)) as bar:
        proved = await part.prove(old, new, bar.add)
    verdict = await verdicts.verify_backend(new)
    columns = ("source", "target", "source_sha256", "target_sha256")
    if as_json:
        return verdicts.print_verdict(verdict, target, as_json, tables=make_rows(proved, columns),
                             fences_raised=proved["events"].moved, **more())
    print_tallies(proved, False, *columns)
    click.echo(f"raised the fences of {proved['events'].moved} unfinished tasks by {FENCES_SKIPPED:,}, and added an "
               "event task.moved to each")
    return verdicts.print_verdict(verdict, target)


async def open_alone(opened: AsyncExitStack, side: str, url: str) -> Backend:
    """Open one side of a copy; refuse a database that a gate serves."""
    from asyncgate.commands import copy as part
    # direct_url and pgbouncer describe one database, not both sides.
    settings = replace(load_settings().settings.database, direct_url="", pgbouncer=False)
    try:
        backend = await backends.open_backend(url, serving=True, settings=settings)
        opened.push_async_callback(backend.close)
        await part.join(backend)
    except (errors.StartupError, part.Served) as wrong:
        status = getattr(wrong, "exit_status", calling.EXIT_BROKEN)     # a database in use is not a wrong request
        kind = errors.StartupError if status == calling.EXIT_WRONG else errors.NotNow
        raise kind(f"cannot open the {side} for exclusive use: {wrong}") from None
    return backend


def make_rows(tallies: Mapping[str, Any], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the counts of a walk, one row per table."""
    rows = ((name, {"source": tally.source, "target": tally.target, "missing": tally.missing,
                    "source_sha256": tally.source_hash.hexdigest()[:16],
                    "target_sha256": tally.target_hash.hexdigest()[:16]}) for name, tally in tallies.items())
    return [{"table": name, **{column: row[column] for column in columns}} for name, row in rows]


def print_tallies(tallies: Mapping[str, Any], as_json: bool, *columns: str) -> None:
    """Print the counts of a walk."""
    rows = make_rows(tallies, columns)
    if as_json:
        return click.echo(msgspec.json.encode({"tables": rows}))
    terminal.show_table(["table", *columns], rows)
    if "missing" in columns:
        click.echo("nothing was written")


def identify_database(url: str) -> str:
    """Return an identity for a database: for a file its real path, else the URL."""
    path = url.removeprefix("sqlite:///")
    return os.path.realpath(path) if path != url and path != ":memory:" else url


def remove_files(*paths: str) -> None:
    """Remove files if they exist."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.remove(path)
