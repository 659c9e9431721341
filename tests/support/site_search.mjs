// A page of the documentation in jsdom, from a file: argv is the page and the words to search for, one search each.
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { JSDOM } = require("jsdom");
const [file, ...searches] = process.argv.slice(2);
const page = await JSDOM.fromFile(file, { runScripts: "dangerously", resources: "usable" });
const { document, Event, KeyboardEvent } = page.window;
if (document.readyState !== "complete") await new Promise(done => page.window.addEventListener("load", done));

const field = document.querySelector("header input");
const found = () => [...document.querySelectorAll("header search li a")].map(one => [one.getAttribute("href"), one.textContent]);
const results = searches.map(words => {
  field.value = words;
  field.dispatchEvent(new Event("input"));
  return found();
});
const hidden = document.querySelector("header search").hidden;
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
console.log(JSON.stringify({ hidden, results, after: found() }));
page.window.close();
