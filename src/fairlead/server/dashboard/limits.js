// Limits and budgets as a list of lines: what is used of each, a meter, and when it renews.

import { element, setAttribute } from "./element.js";
import { once } from "./table.js";
import { count, moment, rate, translate } from "./words.js";

const NEAR = 0.8;

/** Return a limit's words: what is used of it. */
export function limitWords({ kind, limit, used }) {
  const show = kind.startsWith("cost") ? rate : count;
  return translate("limitUse", { kind: translate(kind), used: show(used), limit: show(limit) });
}

/** Return the words for what else there is to say of a limit; "": nothing. */
function aside({ kind, used, limit, renews_at: at }) {
  const words = [];
  if (used >= limit) words.push(translate("reached"));
  if (at && /_(day|month)$/.test(kind)) words.push(translate("renews", { at: moment(at) }));
  return words.join(" · ");
}

function line(use) {
  const part = use.used / use.limit;
  const fill = element("i", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, part)}%`;
  const more = aside(use);
  const made = element("li", { class: part >= 1 ? "spent" : part >= NEAR ? "near" : "" },
    element("span", {}, limitWords(use)),
    ...(more ? [" ", element("span", { class: "aside" }, more)] : []),
    element("span", { class: "meter", "aria-hidden": "true" }, fill));
  setAttribute(made, "title", use.subject ?? null);
  return made;
}

/** Return a cell's list of limits. It is made anew only if it looks different. */
export function limitList(uses, cell) {
  const list = once(cell, () => element("ul", { class: "limits" }));
  const key = JSON.stringify(uses.map((use) => [limitWords(use), aside(use), use.used / use.limit, use.subject]));
  if (list.dataset.shown !== key) list.replaceChildren(...uses.map(line));
  list.dataset.shown = key;
  return list;
}
