// People: who waits, what each has got of the seats against a fair share, and how much of the limits is used.

import { element, setAttribute, setText } from "./element.js";
import { addPage, poll } from "./router.js";
import { once, Table } from "./table.js";
import { count, percent, rate, time, translate } from "./words.js";

const EVERY_MS = 900;

const share = (window) => ({
  head: `share_${window}`,
  number: true,
  show: (row, cell) => {
    const parts = once(cell, makeShare);
    const { part, fair } = row[window];
    setText(parts.words, `${percent(part)}%`);
    setText(parts.fair, fair ? translate("fair", { n: percent(fair) }) : "");
    parts.meter.firstChild.style.width = `${100 * Math.min(1, part)}%`;
    parts.mark.style.left = `${100 * Math.min(1, fair)}%`;
    parts.host.classList.toggle("over", fair > 0 && part > 1.25 * fair && part - fair > 0.05);
    return parts.host;
  },
});

function makeShare() {
  const [words, fair] = [element("span", { class: "value" }), element("span", { class: "aside" })];
  const mark = element("i", { class: "mark" });
  const meter = element("span", { class: "meter", "aria-hidden": "true" }, element("i", { class: "fill" }), mark);
  return { words, fair, mark, meter, host: element("div", { class: "share" }, words, fair, meter) };
}

/** Return a limit's words: what is used of it. */
export function limitWords({ kind, limit, used }) {
  const show = kind.startsWith("cost") ? rate : count;
  return translate("limitUse", { kind: translate(kind), used: show(used), limit: show(limit) });
}

function limits(row, cell) {
  const list = once(cell, () => element("ul", { class: "limits" }));
  const shown = row.limits.map((use) => {
    const part = use.used / use.limit;
    const words = element("span", {}, limitWords(use));
    const fill = element("i", { class: "fill" });
    fill.style.width = `${100 * Math.min(1, part)}%`;
    const line = element("li", { class: part >= 1 ? "spent" : part >= 0.8 ? "near" : "" }, words, element("span", { class: "meter", "aria-hidden": "true" }, fill));
    setAttribute(line, "title", use.subject);
    return line;
  });
  const key = JSON.stringify(row.limits.map((use) => [use.kind, use.subject, use.used, use.limit]));
  if (list.dataset.shown !== key || !cell.contains(list)) list.replaceChildren(...shown);
  list.dataset.shown = key;
  return list;
}

const table = new Table(document.querySelector("#people"), [
  { head: "person", show: ({ tenant, is_own: isOwn }) => (isOwn ? `${tenant} · ${translate("you")}` : tenant), title: ({ keys }) => keys.join(" ") },
  { head: "team", show: ({ team }) => team ?? "" },
  { head: "waiting", number: true, show: (row) => count(row.waiting) },
  { head: "running", number: true, show: (row) => count(row.running) },
  { head: "oldestWait", number: true, show: (row) => (row.oldest_wait_s === null ? "" : time(row.oldest_wait_s)) },
  share("minute"), share("hour"), share("day"),
  { head: "limits", show: limits },
], { keyOf: ({ tenant }) => tenant, empty: "noPeople", label: "people" });

addPage("people", "people", {
  start: () => poll("tenants", EVERY_MS, ({ data }) => table.fill(data)),
  draw: () => table.draw(),
});
