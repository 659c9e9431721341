// When schedules run, from what their schedulers reported: the next run, and how long after it the others come.  Pure.

const HOUR = 3600;
const DAY = 86400;
const EVERY = [[60, "minute"], [HOUR, "hour"], [DAY, "day"], [7 * DAY, "week"]];
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

/** Return how many runs a late schedule has missed. */
export function countMissed({late_since: since, interval_seconds: every}, now) {
  return since && every ? Math.floor((now - Date.parse(since)) / 1000 / every) + 1 : 0;
}

/** Return the runs of a schedule from now to `span` seconds on: `{runs: [ms], count}`; many are only counted.
 *
 * The run that did not come is no run ahead: of a late schedule nobody knows the next one, but an interval goes on.
 */
export function findRuns(schedule, now, span) {
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

const ORDER = ["late", "due", "planned", "unplanned", "off"];

/** Return schedules, late ones first, then by their next run. */
export function orderSchedules(schedules, now) {
  const place = (one) => ORDER.indexOf(stateOfSchedule(one, now));
  const next = (one) => one.next_run_at ?? "9";       // without one it comes after all times
  return [...schedules].sort((one, other) => place(one) - place(other) || next(one).localeCompare(next(other))
    || one.schedule_id.localeCompare(other.schedule_id));
}
