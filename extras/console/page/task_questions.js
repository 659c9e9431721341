// The questions before a task is canceled or gets its artifacts, wherever they are asked.

import {askForm} from "./dialogs.js";
import {endOf} from "./parts.js";

/** What becomes of a task that is canceled. */
export const CANCEL_SAYS = "It ends as canceled, which cannot be undone, and is no longer owed. "
  + "What its worker still does is refused.";
/** The field for the reason of a cancellation. */
export const CANCEL_REASON = {name: "reason", label: "Why", hint: "Its owner is told"};

/** Ask whether to cancel a task; `act` carries it out. */
export function askToCancel({id, name}, act) {
  return askForm(`Cancel: ${name}`, {
    says: `Task ${endOf(id)}. ${CANCEL_SAYS}`, button: "Cancel it", danger: true, fields: [CANCEL_REASON],
    run: ({reason}) => act("cancel_task", {task_id: id, reason: reason.trim() || undefined})});
}

/** Ask where the result of a task is; `act` attaches the addresses. */
export function askToAttach({id, name}, act) {
  return askForm(`Where is it: ${name}`, {
    says: `Task ${endOf(id)}. Saying where its result is discharges what is owed to its owner.`,
    fields: [{name: "addresses", label: "Where the result is", rows: 3, required: true,
      hint: "One address a line, such as s3://bucket/report.pdf"},
    {name: "mime", label: "Media type", hint: "such as text/markdown; may be empty"}],
    button: "Attach",
    run: ({addresses, mime}) => act("attach_artifacts", {task_id: id, artifacts: readArtifacts(addresses, mime)})});
}

function readArtifacts(addresses, mime) {
  const type = mime.trim() && {mime: mime.trim()};
  return addresses.split("\n").map((line) => line.trim()).filter(Boolean).map((uri) => ({uri, ...type}));
}
