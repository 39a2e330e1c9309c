// The six totals, each with a plot of the last minutes, and a table for people who do not use plots.

import { element, setAttribute, setText } from "./element.js";
import { chosenModel } from "./chat.js";
import { plotIn } from "./plot.js";
import { addPage } from "./router.js";
import { server } from "./server.js";
import { add, begin, chooseSpan, column, indexBefore, recentlyRejected, span, times, totalsOf } from "./timeline.js";
import { count, percent, rate, translate, time, wait } from "./words.js";

const SUMMARY_EVERY_MS = 10_000;
const MINUTES = 10;
const ESTIMATE_EVERY_MS = 1000;

// `column` of the timeline; `show` and `unit` format its values; `detail` returns the text next to them.
const TOTALS = [
  { id: "waiting", column: "waiting", show: count, floor: 4, stepped: true,
    detail: ({ queue }) => translate("roomFor", { n: count(queue.capacity) }) },
  { id: "running", column: "running", show: count, floor: 4, stepped: true,
    detail: ({ queue }) => translate("ofSeats", { n: count(queue.seats) }) },
  { id: "oldestWait", column: "oldest_wait_s", show: time, floor: 1, detail: () => estimateWords() },
  { id: "tokens", column: "tokens_per_s", show: rate, floor: 10,
    detail: ({ tokens }) => translate("inAll", { n: count(tokens.generated) }) },
  { id: "cache", column: "cache_usage", show: percent, unit: "%", floor: 0.05, detail: () => "" },
  { id: "rejected", column: "rejected", show: count, floor: 4, stepped: true,
    detail: () => translate("recent", { n: count(recentlyRejected()) }) },
];

let latest = null;
let pointed = null;
let summarized = -Infinity;
let estimate = null; // of a new request's wait
let estimatedAt = -Infinity;

function estimateWords() {
  if (!estimate) return "";
  if (!estimate.position) return translate("noWait");
  return estimate.estimated_wait_s === null ? "" : translate("newWaits", { time: wait(Math.max(1, estimate.estimated_wait_s)) });
}

/** Ask how long a new request for the chosen model would wait, while any waits. */
async function askForEstimate(model) {
  if (performance.now() - estimatedAt < ESTIMATE_EVERY_MS || document.hidden) return;
  estimatedAt = performance.now();
  const path = `queue/estimate?model=${encodeURIComponent(model)}`;
  estimate = await server.call(path).then((response) => response.json()).catch(() => null);
}

const tiles = TOTALS.map((total) => {
  const tile = {
    ...total,
    heading: element("h3"),
    number: element("span", { class: "number" }),
    unitLabel: element("span", { class: "unit" }),
    detailLabel: element("span", { class: "detail" }),
    host: element("div", { class: "plot", role: "img" }),
    left: element("span"),
    right: element("span"),
  };
  const figure = element("p", { class: "figure" }, tile.number, tile.unitLabel, tile.detailLabel);
  const below = element("p", { class: "span", "aria-hidden": "true" }, tile.left, tile.right);
  document.querySelector("#totals").append(
    element("li", { class: "total", "data-total": total.id }, tile.heading, figure, tile.host, below),
  );
  tile.plot = plotIn(tile.host, { ...total, onPoint: (index) => point(index) });
  return tile;
});

const formatted = (tile, value) => (value === null || value === undefined ? translate("none") : tile.show(value) + (tile.unit ?? ""));

/** Return a number and its unit; the whole text if it is not one number with one unit. */
function splitUnit(words) {
  const found = /^([\d.,\u00a0\u202f]+)\s*(\D*)$/.exec(words);
  return found ? found.slice(1) : [words, ""];
}

/** Load the server's history of the last ten minutes. */
export function showHistory({ columns }) {
  begin(columns);
}

/** Show a snapshot. */
export function showTotals(snapshot) {
  latest = { snapshot, totals: totalsOf(snapshot) };
  add(latest.totals);
  if (!snapshot.queue.waiting) estimate = { position: 0 };
  else if (chosenModel()) {
    if (!estimate?.position) estimate = null; // of an empty queue
    askForEstimate(chosenModel());
  }
  draw();
}

/** Redraw everything, in another language. */
export function redrawTotals() {
  summarized = -Infinity;
  if (latest) draw();
  else for (const tile of tiles) {
    setText(tile.heading, translate(tile.id));
    setText(tile.number, translate("none"));
  }
}

function draw() {
  [...picker.options].forEach((option) => setText(option, translate("lastMinutes", { n: Number(option.value) / 60 })));
  const summarize = performance.now() - summarized > SUMMARY_EVERY_MS;
  if (summarize) summarized = performance.now();
  for (const tile of tiles) {
    const values = column(tile.column);
    const now = latest.totals[tile.column];
    const peak = values.reduce((most, value) => Math.max(most, value ?? 0), 0);
    setText(tile.heading, translate(tile.id));
    const [number, unit] = splitUnit(formatted(tile, now));
    setText(tile.number, number);
    setText(tile.unitLabel, unit);
    setText(tile.detailLabel, tile.detail(latest.snapshot));
    tile.peak = translate("peak", { n: formatted(tile, peak) });
    tile.values = values;
    tile.plot.draw(values);
    if (summarize) setAttribute(tile.host, "aria-label", translate("plot", { name: translate(tile.id), now: formatted(tile, now), peak: formatted(tile, peak) }));
    caption(tile);
  }
  if (document.querySelector("#minutes").open) tabulate();
}

function point(index) {
  pointed = index;
  tiles.forEach(caption);
}

/** Write the time span below a plot, or its value at the cursor. */
function caption(tile) {
  const at = pointed === null ? undefined : times()[pointed];
  const [from, to] = span();
  setText(tile.left, translate("ago", { time: at === undefined ? time(60 * Math.round((to - from) / 60)) : time(to - at) }));
  setText(tile.right, at === undefined ? (tile.peak ?? "") : formatted(tile, tile.values?.[pointed]));
}

function tabulate() {
  const table = document.querySelector("#minutes table");
  const heads = [translate("minutesAgo"), ...TOTALS.map(({ id }) => translate(id))];
  table.tHead.replaceChildren(element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head))));
  const rows = [];
  for (let minute = 0; minute < MINUTES; minute += 1) {
    const index = indexBefore(60 * minute);
    if (index < 0) break;
    const cells = tiles.map((tile) => element("td", {}, formatted(tile, tile.values[index])));
    rows.push(element("tr", {}, element("th", { scope: "row" }, count(minute)), ...cells));
  }
  table.tBodies[0].replaceChildren(...rows);
}

const picker = document.querySelector("#now-window");
picker.addEventListener("change", () => {
  chooseSpan(Number(picker.value));
  if (latest) draw();
});

addPage("now", "overview");
document.querySelector("#minutes").addEventListener("toggle", () => latest && draw());
