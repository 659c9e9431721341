// Search in the sections of all pages: those that contain every word, headings first.
"use strict";

const box = document.querySelector("header search");
const field = box.querySelector("input");
const list = box.querySelector("ol");
const MOST = 12;

function rank(section, words) {
  const heading = `${section.page} ${section.heading}`.toLowerCase();
  const text = section.text.toLowerCase();
  if (!words.every((word) => heading.includes(word) || text.includes(word))) return 0;
  return 1 + words.filter((word) => heading.includes(word)).length;
}

function near(text, word) {
  const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
  return (at ? "…" : "") + text.slice(at, at + 140);
}

function item(section, words) {
  const line = document.createElement("li");
  const link = document.createElement("a");
  const about = document.createElement("small");
  link.href = section.at;
  link.textContent = section.heading === section.page ? section.page : `${section.page}: ${section.heading}`;
  about.textContent = near(section.text, words[0]);
  line.append(link, about);
  return line;
}

function look() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? window.sections.map((section) => [rank(section, words), section]) : [];
  const best = found.filter(([points]) => points).sort((a, b) => b[0] - a[0]).slice(0, MOST);
  list.replaceChildren(...best.map(([, section]) => item(section, words)));
}

box.hidden = false;
field.addEventListener("input", look);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { field.value = ""; look(); }
  if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); field.focus(); }
});
document.addEventListener("click", (event) => { if (!box.contains(event.target)) list.replaceChildren(); });
