// When schedules run, from what their schedulers reported: the next run, and how long after it the others come.  Pure.

const HOUR = 3600;
const DAY = 86400;
const EVERY = [[60, "minute"], [HOUR, "hour"], [DAY, "day"], [7 * DAY, "week"]];
const MOST_REPORTED = 200;      // runs, by a scheduler
const MOST_MARKS = 60;          // so many can be told apart in a strip; more become a bar

/** Say how often: every hour, every 5 min; `say` says a length of time. */
export function sayEvery(seconds, say) {
  const exact = EVERY.find(([length]) => length === seconds);
  return `every ${exact ? exact[1] : say(seconds)}`;
}

/** Return the state of a schedule: off, late, due, unplanned, or planned. */
export function stateOfSchedule(schedule, now) {
  if (!schedule.enabled) return "off";
  if (schedule.late_since) return "late";
  if (!schedule.next_run_at) return "unplanned";
  return Date.parse(schedule.next_run_at) < now ? "due" : "planned";
}

/** Say when a schedule runs: its cron expression with its zone, or how often; `say` says a length of time. */
export function sayPlan({cron_expr: cron, timezone: zone, interval_seconds: every}, say) {
  if (cron) return zone && zone !== "UTC" ? `${cron} (${zone})` : cron;
  return every ? sayEvery(every, say) : "–";
}

/** Return how many runs a late schedule has missed. */
export function countMissed({late_since: since, interval_seconds: every, cron_expr: cron, next_runs: runs = []}, now) {
  if (since && cron) return Math.max(1, runs.filter((run) => Date.parse(run) < now).length);
  return since && every ? Math.floor((now - Date.parse(since)) / 1000 / every) + 1 : 0;
}

/** Return the runs of a schedule from now to `span` seconds on: `{runs: [ms], count}`; many are only counted.
 *
 * The run that did not come is not a run ahead: of a late schedule nobody knows the next one, but an interval goes on.
 */
export function findRuns(schedule, now, span) {
  if (schedule.cron_expr) return findCronRuns(schedule, now, span);
  const {next_run_at: next, interval_seconds: every} = schedule;
  if (!schedule.enabled || !next) return {runs: [], count: 0};
  const end = now + span * 1000;
  let first = Date.parse(next);
  if (first < now) {
    if (!every) return {runs: [], count: 0};
    first += Math.ceil((now - first) / (every * 1000)) * every * 1000;
  }
  if (first > end) return {runs: [], count: 0};
  const count = every ? Math.floor((end - first) / (every * 1000)) + 1 : 1;
  const runs = count > MOST_MARKS ? [] : Array.from({length: count}, (none, at) => first + at * every * 1000);
  return {count, first, runs};
}

// A page does not read cron expressions: the scheduler has reported the runs of a week, or as many as it may.
function findCronRuns({enabled, next_runs: reported = []}, now, span) {
  const end = now + span * 1000;
  const times = enabled ? reported.map((run) => Date.parse(run)) : [];
  const runs = times.filter((run) => run >= now && run <= end);
  const isDense = times.length >= MOST_REPORTED && times.at(-1) < end;
  const count = isDense ? Math.round(runs.length * (end - now) / (times.at(-1) - now)) : runs.length;
  return {count, first: runs[0], runs: count > MOST_MARKS ? [] : runs};
}

/** Return the hours or days to write under a strip, as times: each third hour of a day, each midnight of a week. */
export function findTicks(now, span) {
  const ticks = [];
  const step = span > 2 * DAY ? 24 : 3;
  const time = new Date(now);
  time.setMinutes(0, 0, 0);
  for (time.setHours(time.getHours() + 1); time <= now + span * 1000; time.setHours(time.getHours() + 1)) {
    if (time.getHours() % step === 0) ticks.push(time.getTime());
  }
  return ticks;
}

/** Return what people call a schedule. */
export function nameOf({name, schedule_id: id}) {
  return name ?? id;
}

const ORDER = ["late", "due", "planned", "unplanned", "off"];

/** Return schedules, late ones first, then by their next run. */
export function orderSchedules(schedules, now) {
  const place = (schedule) => ORDER.indexOf(stateOfSchedule(schedule, now));
  const next = (schedule) => schedule.next_run_at ?? "9";       // without one it comes after all times
  return [...schedules].sort((first, other) => place(first) - place(other) || next(first).localeCompare(next(other))
    || nameOf(first).localeCompare(nameOf(other)));
}
