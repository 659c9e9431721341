"""The npm package as a user installs it: packed, in an empty folder, with Node's test runner and a strict tsc."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncgate import __version__
from asyncgate.clients import SyncGate
from asyncgate.clients.http import Http
from asyncgate.commands.declare_typescript import TYPESCRIPT_FILE, render_typescript
from asyncgate.commands.main import main
from asyncgate.extras.payloads import FolderStore, Payloads, S3Store
from tests.conftest import Live, Node, tools_of_npm
from tests.support import hasty, s3_server
from tests.support.keeping import keep
from tests.support.npm_package import hash_sources, package_sources
from tests.support.pages import blocks

SUPPORT = Path(__file__).parents[1] / "support" / "typescript"
SOURCE = TYPESCRIPT_FILE.parents[1]
either, s3 = hasty.either, s3_server.s3
AWS = "@aws-sdk/client-s3@3.1175.0"
MASTRA = "@mastra/core@1.71.0"
# Other runtimes, with the package of npm that holds the program, where in it, and how it runs a file.
RUNTIMES = {"bun": ("@oven/bun-linux-x64@1.4.5", "bin/bun", ()),
            "deno": ("@deno/linux-x64-glibc@2.9.6", "deno", ("run", "--allow-all", "--node-modules-dir=manual"))}


def use(package: Any, folder: Path, *names: str) -> Path:
    """A folder beside the package, with files of the tests and what else they import."""
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(SUPPORT / name, folder)
    modules = folder / "node_modules"
    modules.mkdir()
    for path in [*(package.node.folder / "node_modules").iterdir(), package.folder / "node_modules" / "asyncgate"]:
        if not path.name.startswith("."):
            (modules / path.name).symlink_to(path)
    return folder


def find_runtime(name: str, cache: Path) -> list[str]:
    """Return the command that runs a file, or skip the test."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"{name} is taken from npm's package for Linux on x86_64")
    wanted, path, arguments = RUNTIMES[name]
    program = Node.install(tools_of_npm(cache), (wanted,)) / "node_modules" / wanted.rpartition("@")[0] / path
    program.chmod(0o755)
    if subprocess.run([program, "--version"], capture_output=True).returncode != 0:
        pytest.skip(f"{name} does not run on this machine")
    return [str(program), *arguments]


def test_the_generated_file_is_up_to_date() -> None:
    assert TYPESCRIPT_FILE.read_text() == render_typescript(), "run: python -m asyncgate.commands.declare"


def test_the_package_has_the_version_of_the_gate() -> None:
    assert json.loads((SOURCE / "package.json").read_text())["version"] == __version__


def test_only_the_state_of_a_worker_a_folder_and_the_tests_need_what_only_node_has() -> None:
    """So a bundler takes the client to a browser or to the edge."""
    needing = {path.name for path in SOURCE.joinpath("src").glob("*.ts") if re.search(r'from "node:', path.read_text())}

    assert needing == {"folder.ts", "state.ts", "testing.ts"}
    importing = {path.name for path in SOURCE.joinpath("src").glob("*.ts") if 'from "./state.js"' in path.read_text()}
    assert importing == set()


@pytest.mark.parametrize(("whose", "file"), [("Gate", "gate"), ("Worker", "worker")])
def test_its_readme_says_the_default_of_each_option(whose: str, file: str) -> None:
    [names] = re.findall(rf"{whose.upper()}_OPTIONS = \[(.*?)\]", (SOURCE / f"src/{file}.ts").read_text())
    [table] = re.findall(rf"\| option of `new {whose}` .*\n\| ---.*\n((?:\|.*\n)+)", (SOURCE / "README.md").read_text())
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    assert set(re.findall(r"\w+", names)) <= told


def test_the_tarball_has_the_package_and_nothing_else(package: Any) -> None:
    packing = ("pack", "--dry-run", "--ignore-scripts", "--json")
    names = json.loads(package.run("npm", *packing, cwd=package.tarball.parent))
    paths = {entry["path"] for entry in names[0]["files"]}

    assert {"LICENSE", "README.md", "package.json", "dist/esm/operations.js", "dist/cjs/operations.d.ts"} <= paths
    assert {path.split("/")[0] for path in paths} == {"LICENSE", "README.md", "package.json", "dist"}


def test_it_works_against_a_real_gate(package: Any, tmp_path: Path) -> None:
    folder = use(package, tmp_path / "user", "package.test.mjs")

    told = package.run("node", "--test", "--test-reporter=tap", "package.test.mjs", cwd=folder)

    assert re.search(r"^# fail 0$", told, re.M)
    assert re.search(r"^# skipped 0$", told, re.M)
    assert int(re.search(r"^# pass (\d+)$", told, re.M)[1]) >= 20  # type: ignore[index]


@pytest.mark.parametrize(("name", "module", "resolution", "more"), [
    ("usage.ts", "nodenext", "nodenext", ("--lib", "es2022", "--types", "node,react")),
    ("usage.ts", "esnext", "bundler", ("--lib", "es2022,dom", "--types", "react")),
    ("required.ts", "commonjs", "node10", ("--lib", "es2022", "--types", "node")),
    ("required.ts", "commonjs", "node10", ("--target", "es2018", "--lib", "es2018,dom", "--types", "node")),
    ("usage_ai.ts", "nodenext", "nodenext", ("--lib", "es2022,dom", "--skipLibCheck"))])
def test_its_types_hold_for_a_strict_compiler(package: Any, tools_cache: Path, name: str, module: str,
                                              resolution: str, more: tuple[str, ...]) -> None:
    """What it has found good of the same package is not compiled again."""
    kind = json.dumps({"type": "commonjs" if module == "commonjs" else "module"})
    options = ("--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--target", "es2022",
               "--module", module, "--moduleResolution", resolution, *more, "--noEmit")

    def compile_it(folder: Path) -> None:
        use(package, folder, name)
        (folder / "package.json").write_text(kind)
        package.run("tsc", *options, name, cwd=folder)

    sources = [hash_sources(package_sources(), package.node), (SUPPORT / name).read_text(), kind, *options]
    keep(tools_cache, "compiled-strictly", sources, compile_it)


@pytest.mark.parametrize("runtime", ["node", *RUNTIMES])
def test_the_start_of_its_readme_survives_a_kill(
        runtime: str, package: Any, live: Any, tmp_path: Path, tools_cache: Path) -> None:
    """As it stands there, but for the second that each word takes."""
    command = [package.find("node")] if runtime == "node" else find_runtime(runtime, tools_cache)
    folder = use(package, tmp_path / "user")
    (folder / "package.json").write_text('{"dependencies": {"asyncgate": "*"}}')
    worker, agent, *_ = re.findall(r"```js\n(.*?)```", (SOURCE / "README.md").read_text(), re.S)
    (folder / "worker.mjs").write_text(worker.replace("1000", "200"))
    (folder / "agent.mjs").write_text(agent)
    environment = {**package.environment, "ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": "a-token-for-tests",
                   "XDG_STATE_HOME": str(tmp_path)}

    def start(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, name], cwd=folder, env=environment, stdout=subprocess.PIPE,
                                text=True)

    with contextlib.ExitStack() as stack:
        killed, waiting = stack.enter_context(start("worker.mjs")), stack.enter_context(start("agent.mjs"))
        assert killed.stdout
        first = [killed.stdout.readline() for _ in range(4)]
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        again = stack.enter_context(start("worker.mjs"))
        stack.callback(again.kill)
        result = waiting.communicate()[0]
        second = stack.enter_context(start("agent.mjs")).communicate()[0]
        again.terminate()
        rest = again.communicate()[0].splitlines()

    assert first[:2] == ["to 1\n", "be 2\n"]
    assert rest[0] in ("to 5", "be 6", "that 7")     # behind what it has saved
    assert rest[-1] == "question 10"
    # Each runtime prints an object its own way.
    assert re.sub(r"[\s,]", "", result) == re.sub(r"[\s,]", "", second) == "{words:10}"


READER = """
import { FolderStore, Payloads, S3Store } from "asyncgate/payloads";
import { Worker } from "asyncgate";
const [kind, where] = process.argv.slice(2);
const store = kind === "folder" ? new FolderStore(where)
  : new S3Store(new (await import("@aws-sdk/client-s3")).S3({ forcePathStyle: true }), where, PREFIX);
const three = await store.put("0".repeat(64), new Uint8Array(3));
const none = await store.put("1".repeat(64), new Uint8Array());
for (const uri of ["s3://elsewhere/" + "a".repeat(64), "http://127.0.0.1:9/x", three])
  await store.get(uri, 2).then(() => { throw new Error(uri); }, error => console.log(error.constructor.name));
await store.get(none.replace(/1$/, "2"), 2).catch(error => console.log(error.message));
const payloads = new Payloads(store, { aboveBytes: 1000 });
await new Worker({ workerId: "reader", state: null, payloads }).task("twice", text => text + text).run();
"""
TYPED = """
import { S3 } from "@aws-sdk/client-s3";
import { Payloads, S3Store } from "asyncgate/payloads";
export const payloads = new Payloads(new S3Store(new S3({}), "our-bucket", "tasks/"));
"""
PREFIX = "pay loads/é (1)!/"


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_large_payload_of_python_is_read_in_typescript_and_its_result_in_python(
        kind: str, request: pytest.FixtureRequest, package: Any, live: Any, tmp_path: Path, tools_cache: Path) -> None:
    folder, text = use(package, tmp_path / "user"), "é ü %20# " * 200
    (folder / "reader.mjs").write_text(READER.replace("PREFIX", json.dumps(PREFIX)))
    environment = {**package.environment, "ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": "a-token-for-tests"}
    where = str(tmp_path / "pay loads#1") if kind == "folder" else "bucket"
    store: FolderStore | S3Store = FolderStore(where)
    if kind == "s3":
        environment |= {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), **s3_server.SURROUNDINGS}
        store = S3Store(where, PREFIX, s3_server.connect(environment["AWS_ENDPOINT_URL"]))
        store.client.create_bucket(Bucket=where)
        installed = Node.install(tools_of_npm(tools_cache), (AWS,), run=False) / "node_modules"
        (folder / "node_modules" / "@aws-sdk").symlink_to(installed / "@aws-sdk")
        (folder / "typed.ts").write_text(TYPED)
        (folder / "package.json").write_text('{"type": "module"}')
        package.run("tsc", "--strict", "--exactOptionalPropertyTypes", "--target", "es2022", "--module", "nodenext",
                    "--skipLibCheck", "--noEmit", "typed.ts", cwd=folder)

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(
            [package.find("node"), "reader.mjs", kind, where], cwd=folder, env=environment, stdout=subprocess.PIPE,
            text=True))
        stack.callback(process.kill)
        gate = stack.enter_context(SyncGate(live.url, "a-token-for-tests", agent_id="ada", payloads=Payloads(
            store, above_bytes=1000)))
        handle = gate.submit("twice", text)
        result = handle.result()
        task = handle.task()
        assert process.stdout
        told = [process.stdout.readline().strip() for _ in range(4)]

    assert result == text + text
    assert task.payload is None
    assert task.result is not None
    assert task.result.result is None
    assert told[:3] == ["NotInStore", "NotInStore", "PayloadDamaged"]
    assert told[3].endswith("2 is gone")


def test_the_first_worker_in_javascript_does_what_its_agent_wants(package: Any, live: Any, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    told = CliRunner().invoke(main, ["new", str(folder), "--language", "typescript"])
    assert f"&& npm install CHECKOUT/clients/typescript/{package.tarball.name} && asyncgate worker" in told.output
    package.run("npm", "install", "--offline", "--no-audit", "--no-fund", str(package.tarball), cwd=folder)
    worker = folder / "worker.mjs"
    worker.write_text(worker.read_text().replace("pause(1000", "pause(50"))
    environment = {**package.environment, "ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": "a-token-for-tests",
                   "XDG_STATE_HOME": str(tmp_path)}

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([package.find("node"), "worker.mjs"], cwd=folder, env=environment))
        stack.callback(process.kill)
        agent = subprocess.run([package.find("node"), "agent.mjs"], cwd=folder, env=environment, capture_output=True,
                               text=True)

    assert agent.stdout == "{ words: 6 }\n", agent.stderr


@pytest.mark.parametrize(("framework", "dies_at", "models", "either"), [
    ("ai_sdk", "model0", 2, "sqlite"), ("ai_sdk", "deploy", 1, "postgres"),
    ("mastra", "model0", 2, "postgres"), ("mastra", "deploy", 1, "sqlite")], indirect=["either"])
def test_an_agent_in_typescript_that_is_killed_goes_on_and_asks_no_model_twice(
        framework: str, dies_at: str, models: int, package: Any, either: Live, tmp_path: Path,
        tools_cache: Path) -> None:
    """The program of the documentation, with a scripted model in the place of its own."""
    [page] = [block for block in blocks("js", mark="agent:run") if block.more == framework]
    folder = use(package, tmp_path / "user", "script_model.mjs")
    if framework == "mastra":
        installed = Node.install(tools_of_npm(tools_cache), (MASTRA,), run=False)
        (folder / "node_modules" / "@mastra").symlink_to(installed / "node_modules" / "@mastra")
    (folder / "worker.mjs").write_text(page.text.replace('{ openai } from "@ai-sdk/openai"',
                                                         '{ note, openai } from "./script_model.mjs"').replace(
        "      return answer.action", "      note(\"deploy\");\n      return answer.action"))
    environment = {**package.environment, "ASYNCGATE_URL": either.url, "ASYNCGATE_API_KEY": "a-token-for-tests",
                   "XDG_STATE_HOME": str(tmp_path), "NOTES": str(tmp_path / "notes"), "DIES_AT": dies_at}
    boss = {"principal_kind": "human", "principal_id": "boss"}
    with Http(either.url, "a-token-for-tests") as gate, contextlib.ExitStack() as stack:
        def work() -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen([package.find("node"), "worker.mjs"], cwd=folder, env=environment))
            stack.callback(process.kill)
            return process

        made = gate.call("create_task", type="clerk", payload="deploy it", agent_id="ada", max_attempts=1)
        first = work()
        if dies_at == "model0":
            assert first.wait() == -signal.SIGKILL
            work()
        while not (owed := gate.call("list_open_obligations", **boss, wait_seconds=30)["open_obligations"]):
            continue
        gate.call("answer_input", **boss, task_id=made["task_id"], key=owed[0]["body"]["key"], action="accept")
        if dies_at == "deploy":
            assert first.wait() == -signal.SIGKILL
            work()
        task: dict[str, Any] = {}
        while task.get("status") not in ("succeeded", "failed"):
            task = gate.call("get_task", task_id=made["task_id"], wait_seconds=30)

    assert task["result"]["result"] == "it is deployed: v7"
    notes = (tmp_path / "notes").read_text().split()
    assert notes.count("model0") == models      # the answer that it died with is asked for again
    assert notes.count("deploy") == (2 if dies_at == "deploy" else 1)
    assert notes.count("model1") == 1
