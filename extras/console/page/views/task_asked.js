// What a task has asked, and what was answered: by whom, when, and by which receipt that is proven.

import {answerButtons} from "../answers.js";
import {h} from "../dom.js";
import {jsonTree} from "../exact.js";
import {badge, say, section, who} from "../parts.js";
import {link} from "../route.js";
import {when} from "../time.js";
import {sayAnswer} from "../words.js";
import {speaksFor} from "./task_chain.js";

const TONES = {open: "warning", accept: "ok", decline: "failed", cancel: "plain", expired: "plain"};

/** Show the questions of a task in the order of asking; one that is open has the buttons that answer it. */
export function showAsked(inputs, task, page) {
  return section(inputs.length === 1 ? "Question" : "Questions", {id: "questions"},
    h("ol", {class: "cases"}, inputs.map((question) => showOne(question, task, page))));
}

function showOne(question, {task_id: id}, page) {
  const {state, content, answered_at: at, answered_by: by, receipt_id: proof} = question;
  const isOpen = state === "open";
  return h("li", {key: question.request_receipt_id},
    h("p", {class: "case-head"}, badge(sayAnswer(state), TONES[state]), h("strong", null, say(question.message))),
    h("p", {class: "quiet"}, who(question.asked_by), " asked ", who(question.to), ", ",
      when(question.asked_at, page.now()),
      isOpen && question.expires_at && [", expires ", when(question.expires_at, page.now())], " · ", say(question.key)),
    at && h("p", {class: "quiet"}, by ? ["answered by ", who(by), ", "] : "ended ", when(at, page.now())),
    content !== null && h("details", {open: true}, h("summary", null, "Answer"), jsonTree(content)),
    h("div", {class: "actions"},
      isOpen && page.may("answer_input") && speaksFor(question.to)
        && answerButtons({...question, task_id: id}, (...ask) => page.act(...ask)),
      proof && h("a", {class: "button small", href: link(["task", id], {receipt: proof})}, "Show its receipt")));
}
