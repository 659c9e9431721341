/** Standard Schema (https://standardschema.dev): what zod, valibot, arktype and others have in common. */
import { SchemaMismatch } from "./errors.js";

/** A schema of any library that follows Standard Schema. */
export interface StandardSchema<Input = unknown, Output = Input> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => StandardResult<Output> | Promise<StandardResult<Output>>;
    /** Standard JSON Schema, where the library has it. */
    readonly jsonSchema?: { readonly [side in "input" | "output"]: (options: { readonly target: "draft-2020-12" }) => Record<string, unknown> };
    readonly types?: { readonly input: Input; readonly output: Output } | undefined;
  };
}

/** What a validation gives: a value, or issues. */
export type StandardResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | { readonly issues: readonly StandardIssue[] };

/** One thing that is wrong with a value. */
export interface StandardIssue {
  readonly message: string;
  readonly path?: readonly (PropertyKey | { readonly key: PropertyKey })[] | undefined;
}

/** The type of the values that a schema makes. */
export type OutputOf<S> = S extends StandardSchema<any, infer Output> ? Output : never;

/** The JSON schema of what a schema takes or gives; undefined if its library does not say it, or it cannot be said. */
export function describeSchema(schema: StandardSchema<any, any> | undefined, side: "input" | "output"): Record<string, unknown> | undefined {
  try { return schema?.["~standard"].jsonSchema?.[side]({ target: "draft-2020-12" }); } catch { return undefined; }
}

/** Make a value what its schema says; throws SchemaMismatch. */
export async function parse<Output>(schema: StandardSchema<unknown, Output> | undefined, value: unknown, what: string): Promise<Output> {
  if (!schema) return value as Output;
  const result = await schema["~standard"].validate(value);
  if (!result.issues) return result.value;
  throw new SchemaMismatch(what, result.issues.map(issue => ({
    message: issue.message,
    path: (issue.path ?? []).map(step => String(typeof step === "object" ? step.key : step)).join("."),
  })));
}
