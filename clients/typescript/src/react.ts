/** React: follow a task in a browser. The browser holds no credential: your server hands out tickets and shows the task. */
import { useEffect, useState } from "react";
import { pauseAfter, sleep } from "./http.js";
import type { TaskRecord } from "./operations.js";

/** Where a page learns of a task. */
export interface UseTaskOptions {
  /** Fetch the task from your server, which asks the gate: `gate.getTask({ task_id })`. */
  load: (taskId: string, signal: AbortSignal) => Promise<TaskRecord>;
  /** Fetch a ticket from your server, which asks the gate: `gate.makeTicket({ task_id })`. Each is good for five minutes. */
  ticket: (taskId: string, signal: AbortSignal) => Promise<{ path: string }>;
  /** The gate, as the browser reaches it; default: the page's own origin. */
  url?: string;
}

/** A task as a page sees it. */
export interface TaskView<Result> {
  /** The task; undefined until it is there. */
  readonly task: TaskRecord | undefined;
  readonly status: TaskRecord["status"] | undefined;
  readonly progress: unknown;
  /** The result, once the task has succeeded. */
  readonly result: Result | undefined;
  /** Whether the task has ended, in success or not. */
  readonly ended: boolean;
  /** What went wrong with the last look; it is tried again. */
  readonly error: unknown;
}

const AGAIN_MILLISECONDS = 2000;
const LOOKED_AT = ["receipt", "progress", "task.started", "task.held", "task.hold_released", "task.moved", "lease.expired", "left_out"];

/** Follow a task until it has ended; null follows nothing. */
export function useTask<Result = unknown>(taskId: string | null | undefined, options: UseTaskOptions): TaskView<Result> {
  const [seen, setSeen] = useState<{ id?: string; task?: TaskRecord; error?: unknown }>({});
  const { load, ticket, url = "" } = options;
  useEffect(() => {
    if (!taskId) return undefined;
    return followTask(taskId, { load, ticket, url }, (task, error) => setSeen(last => {
      const known = task ?? (last.id === taskId ? last.task : undefined);
      return { id: taskId, ...(known && { task: known }), error };
    }));
    // Functions that are written in the component are new each time, and are not a reason to begin again.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [taskId, url]);
  const task = seen.id === taskId ? seen.task : undefined;
  return {
    task, status: task?.status, progress: task?.progress, ended: isEnded(task), error: seen.id === taskId ? seen.error : undefined,
    result: task?.status === "succeeded" ? task.result?.result as Result : undefined,
  };
}

/** Follow a task without React; gives what ends it. */
export function followTask(taskId: string, options: UseTaskOptions, show: (task: TaskRecord | undefined, error: unknown) => void): () => void {
  const stop = new AbortController();
  let source: EventSource | undefined, again: ReturnType<typeof setTimeout> | undefined, looking = false, stale = false;
  const look = async (): Promise<void> => {
    stale = true;
    if (looking) return;        // what comes meanwhile is one more look
    looking = true;
    for (let failures = 0; stale && !stop.signal.aborted;) {
      stale = false;
      try {
        const task = await options.load(taskId, stop.signal);
        if (stop.signal.aborted) break;
        failures = 0;
        show(task, undefined);
        if (isEnded(task)) end();
      } catch (error) {
        if (stop.signal.aborted) break;
        stale = true;           // no event may come any more
        show(undefined, error);
        await sleep(pauseAfter(++failures, 0.5), stop.signal);
      }
    }
    looking = false;
  };
  const listen = async (): Promise<void> => {
    try {
      const { path } = await options.ticket(taskId, stop.signal);
      if (stop.signal.aborted) return;
      source = new EventSource((options.url ?? "") + path);
      source.onmessage = look;
      for (const type of LOOKED_AT) source.addEventListener(type, look);
      source.onopen = look;
      source.onerror = () => { source?.close(); if (!stop.signal.aborted) again = setTimeout(listen, AGAIN_MILLISECONDS); };
    } catch (error) {
      if (stop.signal.aborted) return;
      show(undefined, error);
      again = setTimeout(listen, AGAIN_MILLISECONDS);
    }
  };
  const end = (): void => {
    stop.abort();
    source?.close();
    clearTimeout(again);
  };
  void look().then(() => { if (!stop.signal.aborted) void listen(); });
  return end;
}

function isEnded(task: TaskRecord | undefined): boolean {
  return task !== undefined && ["succeeded", "failed", "canceled"].includes(task.status);
}
