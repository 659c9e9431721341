/** Ends of tasks that are to be delivered, and where they are kept meanwhile. */

/** How a task has ended, or why it is given back, as the gate is to be told. */
export interface Letter {
  readonly operation: "complete" | "fail" | "release_lease";
  readonly fields: Readonly<Record<string, unknown>>;
  readonly why: string;
}

/** Keeps the ends of one worker process in memory. */
export class MemoryPlace {
  protected unwritten: Letter[] = [];

  constructor(readonly instanceId = crypto.randomUUID().replaceAll("-", "")) {}

  /** The kept ends, oldest first. */
  async letters(): Promise<Letter[]> { return [...this.unwritten]; }

  /** Keep an end; gives where. */
  async keep(letter: Letter): Promise<string> {
    this.unwritten.push(letter);
    return "memory only";
  }

  /** Drop an end that is delivered. */
  async forget(letter: Letter): Promise<void> { this.unwritten = this.unwritten.filter(other => other !== letter); }

  /** Other places of this worker that no process has. */
  async *abandoned(): AsyncGenerator<MemoryPlace> { /* memory has none */ }

  /** Leave the place to the next process. */
  async close(): Promise<void> { /* nothing is held */ }
}
