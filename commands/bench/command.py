"""`asyncgate bench`: measure a gate from outside, with a load of keep-alive connections that send raw HTTP.

    asyncgate bench-server --database sqlite:///bench.db        # a gate, with a bare echo beside it
    asyncgate bench --echo --mode cycle --clients 1,8,32        # in turns, so that a ratio can be quoted
    asyncgate bench --self                                      # both, and the table of docs/numbers.md
    asyncgate bench --beside pgqueuer,nats                      # a gate and other queues, on the same machine

What attacks a gate, slows its disk or drives other queues is in bench/ of the source, and not in the wheel.
Each client sends its next request when the last one is answered.  A mode repeats a step: one cycle is create, claim
and complete, three requests and four receipts.  Compare ratios of one run, not times of different machines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource
from starlette.routing import Route

from asyncgate.clients.http import root_of
from asyncgate.commands import calling
from asyncgate.commands.bench import beside, wire
from asyncgate.commands.bench.fill import FILL_MEANING, FILL_STATES, fill
from asyncgate.commands.bench.load import BESIDE_MODES, COMPLETIONS, EVERY_MODE, OF_TENANTS
from asyncgate.commands.bench.rounds import Figures, Plan, count_clients, measure_rounds
from asyncgate.commands.bench.servers import (
    BenchServer,
    Rest,
    describe_method,
    format_markdown,
    measure_at_rest,
    start_servers,
)
from asyncgate.commands.bench.tenants import make_tenants
from asyncgate.commands.terminal import escape_text
from asyncgate.parts.app import serve_forever
from asyncgate.parts.identity.startup import require_safe_start
from asyncgate.parts.model.settings import Configured
from asyncgate.parts.process.logs import start_logging
from asyncgate.parts.process.options import add_settings_options

MOST_WAITING = 20_000
OWN_SERVER = "--bad-keys, --bad-bodies, --hostile, --slow-disk and --beside"
NO_SOURCE = (f"{OWN_SERVER}, and rivals of these kinds, need the folder bench/, which is not in the wheel: clone the "
             "repository or unpack the source distribution, and run `pip install -e .` there")


class Asked(msgspec.Struct):
    """The options of the command."""

    modes: tuple[str, ...]
    with_echo: bool
    with_mcp: bool
    clients: list[int]
    seconds: float
    count: int | None
    warm_up: float
    rounds: int
    url: tuple[str, ...]
    token: tuple[str, ...]
    bad_keys: int
    bad_bodies: int
    hostile: bool
    no_limits: bool
    slow_disk: float
    beside: list[str]
    as_json: bool
    of_itself: bool
    databases: tuple[str, ...]
    tenants: int | None
    to_fill: int
    states: tuple[str, ...]
    idle: int
    rival: int
    rival_kind: str
    rival_token: str

    def plan(self) -> Plan:
        """Return the plan of the measurement; it has no modes if the options only fill the gate."""
        modes = list(self.modes) or (["create", "mcp"] if self.with_mcp else [])
        if self.of_itself:
            modes = modes or [mode for mode in EVERY_MODE if mode not in ("echo", "health", "limits")]
        elif self.beside:
            modes = modes or list(BESIDE_MODES)
        elif self.bad_keys or self.bad_bodies:
            modes = modes or ["health"]
        elif self.hostile:
            modes = modes or ["create"]
        elif not (modes or self.to_fill):
            modes = ["cycle"]
        if (self.with_echo or self.of_itself) and "echo" not in modes:
            modes = ["echo", *modes]
        return Plan(modes, self.clients, self.seconds, self.count, self.rounds, self.warm_up)


def read_numbers(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Read a list of numbers such as 1,8,32."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text} is not a list of numbers such as 1,8,32") from None
    if min(numbers) < 1:
        raise click.BadParameter("at least one client is needed")
    return numbers


def read_names(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Read a list of queues such as pgqueuer,nats."""
    return list(dict.fromkeys(text.split(","))) if text else []


FILL_STATES_HELP = "; ".join(f"{name}: {says}" for name, says in FILL_MEANING.items())


@click.command()
@click.option("--mode", "modes", multiple=True, type=click.Choice(EVERY_MODE), metavar="MODE",
              help=f"What to measure; repeatable, modes run in turns. One of {', '.join(EVERY_MODE)}. Default cycle.")
@click.option("--echo", "with_echo", is_flag=True, help="Add the mode echo, and show rates as fractions of its rate.")
@click.option("--mcp", "with_mcp", is_flag=True, help="Compare MCP with REST: the same as --mode create --mode mcp.")
@click.option("--clients", default="1,8,32", show_default=True, callback=read_numbers,
              help="Numbers of concurrent clients.")
@click.option("--seconds", default=3.0, show_default=True, type=calling.Duration(0.1),
              help="Duration of each measurement.")
@click.option("--count", type=click.IntRange(min=1), help="Steps of each measurement, instead of --seconds.")
@click.option("--warm-up", default=0.5, show_default=True, type=calling.Duration(),
              help="Duration of the warm-up of each mode.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1),
              help="Rounds; the medians are printed.")
@click.option("--url", envvar="ASYNCGATE_URL", multiple=True, default=("http://127.0.0.1:8080",), show_default=True,
              metavar="URL", help="URL of the gate. Repeat it to measure several in turns, and to compare them.")
@click.option("--token", envvar="ASYNCGATE_API_KEY", multiple=True, type=calling.CREDENTIAL, metavar="TOKEN | @FILE",
              help="Credential; default ASYNCGATE_API_KEY. Repeat it to compare several.")
@click.option("--self", "of_itself", is_flag=True,
              help="Start servers on a new SQLite file and on each --database; print the table as Markdown.")
@click.option("--database", "databases", multiple=True, metavar="URL",
              help="With --self: another database, such as a migrated Postgres. Tasks are written to it. With "
                   "--beside: a superuser's URL of a Postgres server, which gets new databases for the measurement.")
@click.option("--tenants", type=click.IntRange(2, 10_000), metavar="N",
              help="Also measure each mode with clients that go from one to the next of N new tenants, each with a key "
                   "of its own.")
@click.option("--fill", "to_fill", default=0, type=click.IntRange(min=0), metavar="N",
              help="First create N tasks in each --fill-state; measure nothing unless --mode is given.")
@click.option("--fill-state", "states", multiple=True, type=click.Choice(list(FILL_STATES)), metavar="STATE",
              help=f"State of the tasks of --fill; default terminal. {FILL_STATES_HELP}.")
@click.option("--idle", default=0, type=click.IntRange(0, MOST_WAITING), metavar="N",
              help="Keep N claims waiting meanwhile; with --self also measure their cost.")
@click.option("--rival", default=0, type=click.IntRange(0, 100_000), metavar="N",
              help="Measure each mode twice: alone, and beside a rival with N requests in flight.")
@click.option("--rival-kind", default="create", show_default=True, type=click.Choice(beside.RIVALRIES),
              help="Requests of the rival.")
@click.option("--rival-token", default="", type=calling.CREDENTIAL, metavar="TOKEN | @FILE",
              help="Credential of the rival, such as a key of agent bench.rival in another tenant. Default --token.")
@click.option("--bad-keys", default=0, type=click.IntRange(0, 2000), metavar="N",
              help="Start a server; measure its health check alone and beside N clients with bad keys, and its memory.")
@click.option("--bad-bodies", default=0, type=click.IntRange(0, 100), metavar="N",
              help="The same beside N clients that send the most expensive bodies a gate accepts.")
@click.option("--hostile", is_flag=True,
              help="Start two servers with limits; measure a tenant alone, beside a hostile one, and beside the same "
                   "attack on the other server.")
@click.option("--no-limits", is_flag=True, help="With --hostile: without limits.")
@click.option("--slow-disk", default=0.0, type=click.FloatRange(0, 1000), metavar="MS",
              help="Start a server whose commits take MS longer, to measure the value of shared commits.")
@click.option("--beside", default="", callback=read_names, metavar="NAMES",
              help="Start a gate and these queues, as far as they are installed; measure them in turns and print one "
                   "table. The names are in bench/peers/known.py.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure a gate from outside: rates and latencies, medians of several rounds.

    Use a separate database: the load leaves tasks behind, whose types begin with bench.  The mode echo needs
    `asyncgate bench-server`; all rates are then shown as a fraction of the echo's.  tasks/s of complete are cycles/s.

    \b
    asyncgate bench --self                             the table of docs/numbers.md
    asyncgate bench --fill 1000000 --mode claim-empty  is a full gate as fast as an empty one?
    asyncgate bench --mode create --clients 1 --rival 100000
    asyncgate bench --url URL --url URL                which of two gates is faster, such as of two releases?
    asyncgate bench --token SHARED --token aga_...     what does an issued key cost beside the shared token?
    asyncgate bench --tenants 64                       what does it cost that every client is another tenant?
    asyncgate bench --bad-keys 200                     is the health check answered under a flood of bad keys?
    asyncgate bench --bad-bodies 2                     how long can one request hold up the others?
    asyncgate bench --mode cycle --mode limits         what do limits cost a claim?
    asyncgate bench --hostile --clients 1              what can the worst tenant do to another?
    asyncgate bench --slow-disk 4 --clients 1,32       what is sharing a commit worth on a slow disk?
    asyncgate bench --beside pgqueuer,nats,bullmq      how fast are other durable queues on this machine?
    """
    asked = Asked(**{param.name: options[param.name] for param in ctx.command.params if param.name in options})
    if problems := "; ".join(find_contradictions(ctx, asked)):
        raise click.UsageError(problems)
    beside.allow_files(max(2 * max(asked.clients), asked.idle) + asked.idle)
    try:
        find_measurement(asked)(asked)
    except (wire.Failed, ValueError) as wrong:
        exit_with_error(wrong)


def find_measurement(asked: Asked) -> Callable[[Asked], None]:
    """Return the function for the measurement that the options name."""
    if asked.of_itself:
        return measure_itself
    if asked.bad_keys or asked.bad_bodies:
        return measure_flood
    if asked.hostile:
        return measure_hostile
    if asked.beside:
        return measure_others
    return measure_slow_disk if asked.slow_disk else measure_url


def find_contradictions(ctx: click.Context, asked: Asked) -> Iterator[str]:
    """Yield errors for options that exclude each other."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if {"seconds", "count"} <= given:
        yield "--seconds and --count exclude each other"
    if asked.no_limits and not asked.hostile:
        yield "--no-limits needs --hostile"
    if asked.hostile and len(asked.databases) not in (0, 2):
        yield "--hostile takes two databases, one for each of its servers, or none"
    if asked.databases and not (asked.of_itself or asked.beside or asked.hostile):
        yield "--database needs --self, --beside or --hostile: a running gate, named by --url, has its own database"
    if asked.beside and any(database.partition(":")[0] not in ("postgres", "postgresql")
                            for database in asked.databases):
        yield "--beside needs a Postgres server as its --database, such as postgresql://postgres@localhost"
    if asked.beside and (len(asked.databases) > 1 or not {*asked.modes} <= {*BESIDE_MODES}):
        yield f"--beside measures only the modes {' and '.join(BESIDE_MODES)}, and takes only one --database"
    own = sum(map(bool, (asked.bad_keys, asked.bad_bodies, asked.hostile, asked.slow_disk, asked.beside)))
    if (asked.of_itself or own) and {"url", "token"} & given:
        yield f"--self, {OWN_SERVER} start their own servers: omit --url and --token"
    if own and (asked.of_itself or asked.rival or asked.idle or asked.to_fill or asked.with_echo):
        yield f"{OWN_SERVER} allow only --mode, --clients, --seconds, --count, --warm-up and --rounds"
    if (own or asked.rival_kind not in ("create", "claim")) and find_spec("asyncgate.bench") is None:
        yield NO_SOURCE
    if own > 1:
        yield f"{OWN_SERVER} exclude each other"
    if asked.tenants and (asked.of_itself or own > bool(asked.beside) or not {*asked.plan().modes} <= {*OF_TENANTS}):
        yield f"--tenants needs a running gate or --beside, and measures only the modes {', '.join(OF_TENANTS)}"
    if asked.states and not asked.to_fill:
        yield "--fill-state needs --fill N"
    if {"rival_kind", "rival_token"} & given and not asked.rival:
        yield "--rival-kind and --rival-token need --rival N"
    if asked.rival and asked.of_itself:
        yield "--rival needs a running gate, not --self"
    if asked.rival > 2000 and asked.rival_kind == "claim":
        yield "a rival keeps at most 2000 claims in flight, one on each connection"


def exit_with_error(wrong: Exception) -> NoReturn:
    """Exit with one line, and the exit status of the error."""
    sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
    if isinstance(wrong, wire.NoGate):
        raise calling.exit_with(escape_text(str(wrong)), calling.EXIT_NO_GATE)
    status = calling.EXIT_OF_STATUS.get(wrong.status,
                                        calling.EXIT_BROKEN) if isinstance(wrong, wire.Failed) else calling.EXIT_WRONG
    raise calling.exit_with(escape_text(str(wrong)), status)


def measure_url(asked: Asked) -> None:
    """Fill and measure running gates."""
    plan, tokens = asked.plan(), list(enumerate(asked.token or ("",), 1))
    gates = [wire.LoadGate(root_of(url), token, name_gate(asked, url, number))
             for url in asked.url for number, token in tokens]
    fill_gates(asked, gates[::len(tokens)])
    if plan.modes:
        if asked.tenants:
            gates = [spread for gate in gates
                     for spread in (gate, wire.run_on_fastest_loop(make_tenants(gate, asked.tenants)))]
        rows = wire.run_on_fastest_loop(measure_beside(asked, gates, plan))
        click.echo(msgspec.json.encode({"urls": asked.url, "idle": asked.idle, "rows": rows}) if asked.as_json
                   else format_rows(rows))


def name_gate(asked: Asked, url: str, number: int) -> str:
    """Return what tells a gate and a credential from the others that are measured."""
    names = [urlsplit(url).netloc] if len(asked.url) > 1 else []
    return ", ".join([*names, *([f"credential {number}"] if len(asked.token) > 1 else [])])


def measure_flood(asked: Asked) -> None:
    """Start a server and send it bad requests."""
    from asyncgate.bench import bad as part
    with start_servers((), 0) as [server]:
        kind, number = (beside.BAD_KEY, asked.bad_keys) if asked.bad_keys else (beside.BAD_BODY, asked.bad_bodies)
        flood = wire.run_on_fastest_loop(part.measure_flood(server, asked.plan(), kind, number))
    click.echo(msgspec.json.encode(flood)
               if asked.as_json else f"{format_rows(flood.rows)}\n{part.format_memory(flood)}")


def measure_hostile(asked: Asked) -> None:
    """Start a server with limits, and measure one tenant beside a hostile one."""
    from asyncgate.bench import hostile as part
    sets, (mine, control) = part.UNLIMITED if asked.no_limits else part.LIMITED, asked.databases or ("", "")
    with (start_servers((mine,) if mine else (), 0, sets) as [*_, server],
          start_servers((control,) if control else (), 0, sets) as [*_, other]):
        rows = wire.run_on_fastest_loop(part.measure_victim(server, other, asked.plan(), not asked.no_limits))
    click.echo(msgspec.json.encode(rows) if asked.as_json else part.format_verdict(rows))


def measure_slow_disk(asked: Asked) -> None:
    """Start a server that is slow to commit, and compare many clients with few."""
    from asyncgate.bench import slow_disk as part
    with start_servers((), 0, program=part.name_program(asked.slow_disk)) as [server]:
        rows = wire.run_on_fastest_loop(measure_rounds([server.gate], asked.plan()))
    click.echo(msgspec.json.encode(rows) if asked.as_json else "\n".join([format_rows(rows),
                                                                           *part.compare_clients(rows)]))


def measure_others(asked: Asked) -> None:
    """Start a gate and other queues, and measure them in turns."""
    from asyncgate.bench.peers import runner as part
    comparison = part.measure_peers(asked.beside, "".join(asked.databases), asked.plan(), asked.tenants)
    click.echo(msgspec.json.encode(comparison) if asked.as_json else part.format_comparison(comparison))


async def measure_beside(asked: Asked, gates: list[wire.LoadGate], plan: Plan) -> list[Figures]:
    """Measure, with the background load that the options name."""
    other = partial(beside.run_rival, token=asked.rival_token, kind=asked.rival_kind, number=asked.rival)
    async with beside.keep_waiting(gates if asked.of_itself else gates[:1], asked.idle):
        return await measure_rounds(gates, plan, asked.rival, other if asked.rival else None)


def fill_gates(asked: Asked, gates: list[wire.LoadGate]) -> None:
    """Fill gates, with a progress bar."""
    states = asked.states or ("terminal",)
    for gate in gates if asked.to_fill else ():
        label = f"filling {gate.name or gate.url}"
        with click.progressbar(length=asked.to_fill * len(states), label=label, file=sys.stderr) as bar:
            for state in states:
                wire.run_on_fastest_loop(fill(gate, state, asked.to_fill, bar.update))


def measure_itself(asked: Asked) -> None:
    """Start servers, fill and measure them, and print the table."""
    plan = asked.plan()
    with start_servers(asked.databases, asked.idle) as servers:
        fill_gates(asked, [server.gate for server in servers])
        rests, rows = wire.run_on_fastest_loop(measure_all(asked, servers, plan))
    method = describe_method(plan, rows)
    whole = {"method": method, "idle": rests, "rows": rows}
    click.echo(msgspec.json.encode(whole) if asked.as_json else format_markdown(rows, rests, method))


async def measure_all(asked: Asked, servers: list[BenchServer], plan: Plan) -> tuple[list[Rest], list[Figures]]:
    """Measure the cost of waiting claims, if any, then all modes."""
    seconds = plan.seconds * plan.rounds
    rests = [await measure_at_rest(server, asked.idle, seconds) for server in servers] if asked.idle else []
    return rests, await measure_beside(asked, [server.gate for server in servers], plan)


# Text output.


def format_rows(rows: list[Figures]) -> str:
    """Format the rows as text; include the ratio to the echo if it was measured."""
    echo = {(row.clients, row.database): row.requests_per_second for row in rows
            if row.mode == "echo" and not row.rival}
    wide = max(len(format_label(row)) for row in rows)
    lines = [f"{'mode':{wide}} {'clients':>7}  {'operation':16} {'requests/s':>10} {'of echo':>8} {'tasks/s':>8} "
             f"{'p50 ms':>8} {'p99 ms':>8} {'p999 ms':>8}"]
    for row in sorted(rows, key=lambda figures: (EVERY_MODE.index(figures.mode), figures.clients, figures.rival)):
        bare = echo.get((row.clients, row.database))
        ratio = f"{row.requests_per_second / bare:.2f}" if bare else "-"
        tasks = f"{row.tasks_per_second:,.0f}" if row.tasks_per_second else "-"
        lines.append(f"{format_label(row):{wide}} {row.clients:7}  {row.operation:16} {row.requests_per_second:10,.0f} "
                     f"{ratio:>8} {tasks:>8} {row.p50_ms:8.2f} {row.p99_ms:8.2f} {row.p999_ms:8.2f}")
    return "\n".join([*lines, *format_cycles(rows), *format_slowdowns(rows), *format_comparisons(rows)])


def format_label(figures: Figures) -> str:
    """Return the name of a mode, and of the rival beside it."""
    told = f"{figures.mode} beside {figures.rival}" if figures.rival else figures.mode
    return f"{told} ({figures.database})" if figures.database else told


def format_cycles(rows: list[Figures]) -> Iterator[str]:
    """Yield the number of tasks completed per second."""
    for row in rows:
        if row.operation in COMPLETIONS:
            yield f"{format_label(row)}, {count_clients(row.clients)}: {row.tasks_per_second:,.0f} cycles/s"


def format_slowdowns(rows: list[Figures]) -> Iterator[str]:
    """Yield how much slower a rival makes each operation."""
    alone = {(row.mode, row.clients, row.operation, row.database): row for row in rows if not row.rival}
    for row in rows:
        if row.rival:
            lone = alone[row.mode, row.clients, row.operation, row.database]
            yield (f"{format_label(lone)}, {count_clients(row.clients)}, {row.operation}: "
                   f"p50 {row.p50_ms / lone.p50_ms:.2f} ×, "
                   f"p99 {row.p99_ms / lone.p99_ms:.2f} × beside {row.rival}")


def format_comparisons(rows: list[Figures]) -> Iterator[str]:
    """Yield the rate of each further gate and credential relative to the first, in the same run."""
    first = next((row.database for row in rows), "")
    base = {(row.mode, row.clients, row.operation, row.rival): row for row in rows if row.database == first}
    for row in rows:
        if row.database != first and row.mode != "echo":
            with_first = base[row.mode, row.clients, row.operation, row.rival]
            yield (f"{format_label(row)}, {count_clients(row.clients)}, {row.operation}: "
                   f"{row.requests_per_second / with_first.requests_per_second:.3f} × the rate with "
                   f"{first or 'one tenant'}")


class EchoBody(msgspec.Struct):
    """The body that the echo reads, similar to a task."""

    type: str
    payload: msgspec.Raw


async def echo(request: Any) -> Any:
    """Decode a body into a Struct and answer with JSON, as a plain Starlette route does."""
    from starlette.responses import Response
    document = msgspec.json.decode(await request.body(), type=EchoBody)
    return Response(msgspec.json.encode({"type": document.type, "status": "queued"}), media_type="application/json")


@click.command("bench-server")
@click.option("--host", metavar="ADDRESS", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=int, metavar="NUMBER", help="Port to listen on; default 8080, 0 takes any free one.")
@add_settings_options
def bench_server(configured: Configured) -> None:
    """Serve a gate with a bare echo at /echo, the baseline of `asyncgate bench`."""
    require_safe_start(configured.settings)
    start_logging(configured.settings)
    sys.exit(serve_forever(configured.settings, beside=[Route("/echo", echo, methods=["POST"])]))
