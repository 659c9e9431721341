"""Random programs on a simulated gate that dies in the midst of calls, compared with the oracle.

The rules are those of test_programs.py, the gate and its faults those of simulation.py.  Whether a call that was cut
off had been committed is certain here: then the oracle carries it out, too, and the client asks once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from asyncgate.backends.memory import make_template
from asyncgate.conformance.evidence import LISTED_VIOLATIONS, TortureReport, begin_evidence, write_evidence
from asyncgate.conformance.harness import Gate, OwnTenants, ask_of, settings_for_tests
from asyncgate.conformance.load import TENANT
from asyncgate.conformance.model import Model, Rules
from asyncgate.conformance.simulation import (
    Database,
    Host,
    Member,
    World,
    collected_errors,
    replaced_sources,
    simulate,
)
from asyncgate.conformance.test_programs import AgainstTheOracle, Run, Side, Who, settings_of, written_out
from asyncgate.conformance.torture import Round, TorturePlan
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.operations import OPERATIONS

EVERY_ROUND = 5                   # which round has programs
PROGRAMS, PROGRAM_STEPS = 5, 35     # of a round
DIES, STEPS_OF_A_CALL = 0.05, 20
OTHER_TENANT = TENANT.replace("0", "1")


def simulate_round(seed: int) -> tuple[Round, str]:
    """Run the round of a seed, the same each time; return what it did, and the hash of all that happened."""
    return simulate_programs(seed) if seed % EVERY_ROUND == 0 else simulate(seed)


def run_steps(steps: int, given: int | None, command: str, folder: Path | None,
              tell: Callable[[str], object]) -> TortureReport:
    """Run rounds, each of the next seed, until they had enough steps; `tell` gets a line now and then."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    seed, hashes = random.randrange(2**32) if given is None else given, hashlib.sha256()
    plan, report = TorturePlan("simulation", (), seed), begin_evidence(command, seed, 0)
    with report.noting_interrupt():
        tell(f"seed {seed}")
        for number in itertools.count(seed):
            done, trace = simulate_round(number)
            hashes.update(trace.encode())
            report.count(plan, done, folder)
            for text in done.violations[:LISTED_VIOLATIONS]:
                tell(f"  {text}\n  again: asyncgate torture --simulate 1 --seed {number}")
            [row] = report.databases
            if row.operations >= steps or row.rounds % 100 == 0:
                tell(f"{row.operations:,} steps, {row.violations} violations, {row.operations / row.seconds:.0f} steps "
                     f"a second, trace {hashes.hexdigest()[:16]}")
            if row.operations >= steps or report.interrupted:
                break
    if folder is not None:
        write_evidence(folder, report)
    return report


class FaultySide(Side):
    """A gate that runs a program; it may die at each statement and at each await of a call, and is started again."""

    def __init__(self, world: World, run: Run, rules: Rules, died: Callable[..., object]) -> None:
        self.world, self.died, self.host, self.settings = world, died, world.hosts[0], settings_of(rules)
        super().__init__(run, OwnTenants(self.begin()), rules, [TENANT, OTHER_TENANT])

    def begin(self) -> Member:
        """Return the backend of a new process."""
        self.host.member = Member(self.world, self.host)
        return self.host.member

    def perform(self, who: Who, name: str, fields: dict[str, Any]) -> tuple[Any, ...]:
        """Perform an operation; if the gate dies over it, ask the next one again, as clients do."""
        world = self.world
        in_pieces = name == "run_bulk" or bool(fields.get("cascade"))
        world.striking = not in_pieces and world.draw.random() < DIES
        world.statements, world.callbacks = world.draw_distance(STEPS_OF_A_CALL), world.draw_distance(STEPS_OF_A_CALL)
        before, reply = world.commits, None
        with contextlib.suppress(asyncio.CancelledError):
            reply = super().perform(who, name, fields)
        world.striking = False
        if self.host.member is None or not self.host.member.lives:
            self.start_again()
        if reply is None or reply[1] == "database_unavailable":
            if world.commits > before:
                self.died(who, name, fields)
            reply = super().perform(who, name, fields)
        world.trace(name, reply)
        return reply

    def start_again(self) -> None:
        """Start another gate on what the one that has died has left."""
        before, after = self.backend.backend, self.begin()
        after.ids, after.skew, after.clock = before.ids, before.skew, before.clock
        self.backend.backend = after
        engine = engine_over(self.backend, settings_for_tests(**self.settings))
        self.gates = [Gate(engine, gate.tenant_id) for gate in self.gates]


class SimulatedPrograms(AgainstTheOracle):
    """A program on such a gate, compared with the oracle."""

    def __init__(self, seed: int, done: Round, digest: Any) -> None:
        super().__init__(self.run_inside, None)  # type: ignore[arg-type]
        self.world, self.round, self.digest, self.opened = World(seed, 1), done, digest, contextlib.ExitStack()
        self.world.kinds, self.world.over = ["kill"], True

    def begin(self, rules: Rules) -> None:
        world = self.world
        self.opened.enter_context(replaced_sources(world.draw, world.loop))
        self.runner = self.opened.enter_context(asyncio.Runner(loop_factory=lambda: world.loop))
        world.database, world.hosts = Database(), [Host(world, 0)]
        self.side = FaultySide(world, self.run_inside, rules, self.note_death)
        self.epoch = self.side.epoch
        self.models = [Model(rules, self.epoch) for _ in self.side.gates]

    def run_inside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the process of the gate."""
        async def wait() -> Any:
            member = self.world.hosts[0].member
            if member is None or not member.lives:
                work.close()
                raise asyncio.CancelledError
            await asyncio.wait([task := self.world.spawn(member, work)])
            return task.result()
        return self.runner.run(wait())

    def note_death(self, who: Who, name: str, fields: dict[str, Any]) -> None:
        """Let the oracle do what the gate did before it died: nobody has heard the answer."""
        self.expect(who, name, ask_of(OPERATIONS[name], written_out(fields)))
        self.round.unknown += 1

    def perform(self, who: Who, name: str, /, **fields: Any) -> Any:
        self.round.operations += 1
        return super().perform(who, name, **fields)

    def teardown(self) -> None:
        """Compare the final states."""
        with self.opened:
            super().teardown()
            self.world.database.db.close()
            self.round.faults += self.world.faults
            self.digest.update(self.world.hash.digest())


def simulate_programs(seed: int, programs: int = PROGRAMS) -> tuple[Round, str]:
    """Run random programs beside the oracle; return what they did, and the hash of all that happened."""
    make_template()
    begun, done, digest = time.monotonic(), Round(seed), hashlib.sha256()
    machine: Any = hypothesis.seed(seed)(lambda: SimulatedPrograms(seed, done, digest))
    settings = hypothesis.settings(
        max_examples=programs, stateful_step_count=PROGRAM_STEPS, database=None, deadline=None, print_blob=False,
        derandomize=False, phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck))
    with collected_errors() as logged:
        try:
            run_state_machine_as_test(machine, settings=settings)
        except Exception as wrong:
            done.violations.append("\n".join([f"ORACLE: {wrong!r}", *getattr(wrong, "__notes__", ())]))
    done.violations += logged
    done.seconds = time.monotonic() - begun
    return done, digest.hexdigest()
