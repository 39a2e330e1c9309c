// People: who waits, what each has got of the seats against a fair share, and how much of the limits is used.

import { element, setText } from "./element.js";
import { limitList } from "./limits.js";
import { addPage, poll } from "./router.js";
import { once, Table } from "./table.js";
import { count, percent, time, translate } from "./words.js";

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

function limits({ limits: uses }, cell) {
  const now = Date.now() / 1000;
  return limitList(uses.map((use) => ({ ...use, renews_at: use.renews_in_s === null ? null : now + use.renews_in_s })), cell);
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
  start: () => poll("tenants", ({ data }) => table.fill(data)),
  draw: () => table.draw(),
});
