// The long lists and the text filter of the console, without a browser: argv is the folder with a copy of the page.
import assert from "node:assert/strict";

globalThis.document = { baseURI: "http://gate/console/" };
const from = (name) => import(`file://${process.argv[2]}/${name}.js`);
const { Pages } = await from("pages");
const { isType, readAge, readFilter, readMoment, readWho, withWord } = await from("filter");
const { listSpans } = await from("views/inbox");
const { wordsAt } = await from("views/tasks");

const PAGE = 20;
const MOST_READS = 3;       // of a look at one screen
const NOW = Date.parse("2026-11-23T12:00:00Z");

/** A list of ids as the gate keeps it: read by pages, with a cursor that names its last row. */
class Kept {
  constructor(newest) {
    Object.assign(this, { newest, ids: [], last: 0, reads: 0, cursors: new Map() });
  }

  add(count) {
    for (let at = 0; at < count; at++) this.ids.push(String(++this.last).padStart(8, "0"));
  }

  remove(number) {
    this.ids = this.ids.filter((id) => Number(id) % number);
  }

  get rows() {
    return this.newest ? [...this.ids].reverse() : this.ids;
  }

  read = async (ask, cursor) => {
    this.reads += 1;
    if (cursor) assert.equal(this.cursors.get(cursor), ask, "a cursor goes on with the filter that it was given for");
    const rest = this.rows.filter((id) => !cursor || (this.newest ? id < cursor : id > cursor));
    const rows = rest.slice(0, PAGE).map((id) => ({ id }));
    const next = rest.length > PAGE ? rows.at(-1).id : null;
    if (next) this.cursors.set(next, ask);
    return { rows, next };
  };
}

function begin(newest, count) {
  const kept = new Kept(newest);
  kept.add(count);
  return { kept, pages: new Pages(kept.read, (row) => row.id, newest) };
}

const shown = (pages) => pages.rows.map((row) => row.id);

const rules = {
  async "a list that is read to its end has every row once, in its order"() {
    for (const newest of [true, false]) {
      const { kept, pages } = begin(newest, 7 * PAGE + 3);
      await pages.look({});
      while (!pages.done) await pages.more();
      assert.deepEqual(shown(pages), kept.rows);
    }
  },

  async "what is in sight is read again: new rows come, others go, and nothing between is missed"() {
    for (const newest of [true, false]) {
      const { kept, pages } = begin(newest, 10 * PAGE);
      await pages.look({});
      for (let at = 0; at < 4; at++) await pages.more();
      for (let round = 2; round < 12; round++) {
        kept.add(round);
        kept.remove(50 + round);
        await pages.look({ round }, { from: 0, to: PAGE / 2 });
        assert.deepEqual(shown(pages).slice(0, PAGE), kept.rows.slice(0, PAGE));
        assert.equal(new Set(shown(pages)).size, pages.rows.length);
      }
      assert.ok(pages.places.length < 12, `${pages.places.length} places`);
    }
  },

  async "far down a list only the pages in sight are read, and the rows above stay where they are"() {
    const { kept, pages } = begin(true, 40 * PAGE);
    await pages.look({});
    while (!pages.done) await pages.more();
    const above = shown(pages).slice(0, 600);
    kept.add(5);
    kept.reads = 0;
    await pages.look({}, { from: 600, to: 620 });
    assert.ok(kept.reads <= MOST_READS, `${kept.reads} reads`);
    assert.deepEqual(shown(pages).slice(0, 600), above);
  },

  async "a list begins anew where more has come than one page, for it would have a gap"() {
    const { kept, pages } = begin(true, 5 * PAGE);
    await pages.look({});
    await pages.more();
    kept.add(3 * PAGE);
    await pages.look({}, { from: 0, to: PAGE / 2 });
    while (!pages.done) await pages.more();
    assert.deepEqual(shown(pages), kept.rows);
  },

  async "a list that was at its end goes on when it has grown"() {
    const { kept, pages } = begin(false, PAGE + 5);
    await pages.look({});
    await pages.more();
    assert.equal(pages.done, true);
    kept.add(3 * PAGE);
    await pages.look({}, { from: PAGE, to: PAGE + 5 });
    while (!pages.done) await pages.more();
    assert.deepEqual(shown(pages), kept.rows);
  },

  "the filter of tasks asks for what it says"() {
    const { values, problems } = readFilter(
      "type:ocr* status:queued owner:human:ada age:>1h held:no created:>2026-11-01 summary:\"Monthly \\\"report\\\"\" id:01AB", wordsAt(NOW));
    assert.deepEqual(problems, []);
    assert.deepEqual(values, { type_prefix: "ocr", status: "queued", created_by: "ada", created_by_kind: "human",
      created_before: "2026-11-23T11:00:00.000Z", held: false, created_after: "2026-11-01T00:00:00.000Z", summary_prefix: "Monthly \"report\"",
      id_prefix: "01ab" });
    assert.deepEqual(readFilter("01a20a41", wordsAt(NOW)).values, { id_prefix: "01a20a41" });
    assert.deepEqual(readFilter("Monthly", wordsAt(NOW)).values, { summary_prefix: "Monthly" });
    assert.ok(isType("ocr.scan", "ocr*") && isType("ocr", "ocr") && !isType("ocr.scan", "ocr"));
  },

  "a filter leaves nothing out in silence: each word that it cannot use is a problem"() {
    for (const wrong of ["colour:red", "status:lost", "age:1h", "age:>soon", "created:2026", "created:>yesterday", "held:maybe", "type:", "type:two"]) {
      const { values, problems } = readFilter(`type:ocr ${wrong}`, wordsAt(NOW));
      assert.equal(problems.length, 1, wrong);
      assert.ok(problems[0].includes(wrong), problems[0]);
      assert.deepEqual(values, { type: "ocr" });
    }
  },

  "a word of a filter is replaced by itself, whatever its value has in it"() {
    for (const value of ["ocr", "two words", "a \"quoted\" one", "back\\slash \"", "back\\slash", "status:queued", "<b>"]) {
      const written = withWord(withWord("type:old status:queued", "type", value), "status", null);
      assert.deepEqual(readFilter(written, wordsAt(NOW)), { values: { type: value }, problems: [] });
    }
  },

  "tasks that were made together are read together, and a few by themselves"() {
    const made = (second, number) => `01a20a4${second}-0000-7000-8000-${String(number).padStart(12, "0")}`;
    const many = Array.from({ length: 8 }, (_, at) => made(1, at));
    const others = Array.from({ length: 7 }, (_, at) => made(9, at));
    assert.deepEqual(listSpans([...many, made(5, 0), ...others]), [many, others]);
  },

  "names, ages and moments are read as people write them"() {
    assert.deepEqual(readWho("agent:a:b"), { kind: "agent", id: "a:b" });
    assert.deepEqual(readWho("a:b"), { id: "a:b" });
    assert.deepEqual(readAge("<2d"), { over: false, seconds: 172800 });
    assert.deepEqual(readMoment("<2026-11-01T08:00"), { after: false, moment: "2026-11-01T08:00:00.000Z" });
    assert.deepEqual(readMoment(">2026-11-01T08:00+02:00"), { after: true, moment: "2026-11-01T06:00:00.000Z" });
  },
};

for (const [name, hold] of Object.entries(rules)) {
  try {
    await hold();
  } catch (wrong) {
    console.error(`${name}: ${wrong.stack}`);
    process.exitCode = 1;
  }
}
