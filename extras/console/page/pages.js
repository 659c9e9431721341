// Long lists that are read by pages.  Rows lie in the order of their ids, which is the order of their age.  A cursor
// keeps its place and its filter, so the pages in sight can be read again while the others stay as they were.

const NEAR_ROWS = 100;      // places nearer to each other than that are one

export class Pages {
  /** `read(ask, cursor)` returns `{rows, next}`; `id(row)`; `newest` says whether the newest row comes first. */
  constructor(read, id, newest = false) {
    Object.assign(this, {read, id, newest, rows: [], done: false, busy: null});
    this.places = [{above: null, cursor: null}];        // where reading may begin, in order
  }

  isBefore(first, other) {
    return this.newest ? first > other : first < other;
  }

  /** Read again the pages that rows `from` to `to` lie in; a new `ask` counts for what is read from the top. */
  async look(ask, {from = 0, to = 0} = {}) {
    this.places[0].ask = ask;
    const first = this.rows[from];
    const last = this.rows[Math.min(to, this.rows.length) - 1];
    let place = this.placeBefore(first && this.id(first));
    while (place) place = this.goOn(await this.readAt(place), last && this.id(last));
  }

  /** Read one page more at the end; a second call waits for the first. */
  more() {
    if (this.done || !this.rows.length) return null;
    return this.busy ??= this.readAt(this.places.at(-1)).finally(() => (this.busy = null));
  }

  placeBefore(id) {
    const before = this.places.filter(({above}) => above === null || (id !== undefined && this.isBefore(above, id)));
    return before.at(-1);
  }

  goOn(place, until) {
    return place && until !== undefined && this.isBefore(place.above, until) ? place : null;
  }

  /** Read the page at a place, and return the place behind it, if there is one. */
  async readAt(place) {
    const {rows, next} = await this.read(place.ask, place.cursor);
    if (!this.places.includes(place)) return null;      // another reading has begun anew meanwhile
    if (place.above === null && next && this.isElsewhere(rows)) Object.assign(this, {rows: [], places: [place]});
    const end = next ? this.id(rows.at(-1)) : null;
    const behind = end === null ? [] : this.rows.slice(this.rankOf(end));
    this.rows = [...this.rows.slice(0, this.rankOf(place.above)), ...rows, ...behind];
    return this.keepPlaces(place, end, next);
  }

  /** Return how many rows there are up to an id. */
  rankOf(id) {
    let [low, high] = [0, id === null ? 0 : this.rows.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.isBefore(id, this.id(this.rows[middle]))) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // So many new rows have come that what is known lies behind a gap.
  isElsewhere(rows) {
    const known = new Set(this.rows.map(this.id));
    return known.size > 0 && !rows.some((row) => known.has(this.id(row)));
  }

  keepPlaces(place, end, next) {
    const before = this.places.slice(0, this.places.indexOf(place) + 1);
    const behind = end === null ? [] : this.places.filter(({above}) => above !== null && this.isBefore(end, above));
    if (end === null || !behind.length) this.done = end === null;
    if (behind.length > 1 && this.rankOf(behind[0].above) - this.rankOf(end) < NEAR_ROWS) behind.shift();
    const added = end === null ? [] : [{above: end, cursor: next, ask: place.ask}];
    this.places = [...before, ...added, ...behind];
    return added[0] ?? null;
  }
}
