// Build the package: ES modules and CommonJS with their types, from the sources and the generated operations.ts.
import { execFileSync } from "node:child_process";
import { copyFileSync, existsSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

process.chdir(fileURLToPath(new URL(".", import.meta.url)));
if (!existsSync("src/operations.ts")) throw new Error("src/operations.ts is generated: run `python -m asyncgate.commands.declare`");
const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
rmSync("dist", { recursive: true, force: true });
execFileSync(process.execPath, [tsc, "-p", "."], { stdio: "inherit" });
execFileSync(process.execPath, [tsc, "-p", ".", "--module", "commonjs", "--moduleResolution", "node10", "--outDir", "dist/cjs"], { stdio: "inherit" });
mkdirSync("dist/cjs", { recursive: true });
writeFileSync("dist/cjs/package.json", '{ "type": "commonjs" }\n');
if (existsSync("../../LICENSE")) copyFileSync("../../LICENSE", "LICENSE");
