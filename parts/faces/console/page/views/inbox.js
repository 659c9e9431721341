// (to be written)
import {h} from "../dom.js";
export async function load() { return {}; }
export function show() { return h("h1", null, "inbox"); }
