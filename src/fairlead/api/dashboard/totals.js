// The six totals, each with a plot of the last ten minutes, and a table for people who do not use plots.

import { element, mark, put } from "./element.js";
import { plotIn } from "./plot.js";
import { add, begin, column, indexBefore, rejectedLately, span, times, totalsOf } from "./timeline.js";
import { count, percent, rate, say, time } from "./words.js";

const SUMMARY_EVERY_MS = 10_000;
const MINUTES = 10;

// `column` of the timeline; `show` and `unit` format its values; `beside` returns the text next to them.
const TOTALS = [
  { id: "waiting", column: "waiting", show: count, floor: 4, stepped: true,
    beside: ({ queue }) => say("roomFor", { n: count(queue.capacity) }) },
  { id: "running", column: "running", show: count, floor: 4, stepped: true,
    beside: ({ queue }) => say("ofSeats", { n: count(queue.seats) }) },
  { id: "meanWait", column: "mean_wait_s", show: time, floor: 1,
    beside: ({ queue }) => (queue.mean_service_s ? say("service", { time: time(queue.mean_service_s) }) : "") },
  { id: "tokens", column: "tokens_per_s", show: rate, floor: 10,
    beside: ({ tokens }) => say("inAll", { n: count(tokens.generated) }) },
  { id: "cache", column: "cache_usage", show: percent, unit: "%", floor: 0.05, beside: () => "" },
  { id: "rejected", column: "rejected", show: count, floor: 4, stepped: true,
    beside: () => say("lately", { n: count(rejectedLately()) }) },
];

let latest = null;
let pointed = null;
let summarized = -Infinity;

const tiles = TOTALS.map((total) => {
  const tile = {
    ...total,
    heading: element("h3"),
    number: element("span", { class: "number" }),
    unitLabel: element("span", { class: "unit" }),
    besideLabel: element("span", { class: "of" }),
    host: element("div", { class: "plot", role: "img" }),
    left: element("span"),
    right: element("span"),
  };
  const figure = element("p", { class: "figure" }, tile.number, tile.unitLabel, tile.besideLabel);
  const below = element("p", { class: "span", "aria-hidden": "true" }, tile.left, tile.right);
  document.querySelector("#totals").append(
    element("li", { class: "total", "data-total": total.id }, tile.heading, figure, tile.host, below),
  );
  tile.plot = plotIn(tile.host, { ...total, onPoint: (index) => point(index) });
  return tile;
});

const written = (tile, value) => (value === null || value === undefined ? say("none") : tile.show(value) + (tile.unit ?? ""));

/** Return a number and its unit; the whole text if it is not one number with one unit. */
function apart(words) {
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
  draw();
}

/** Redraw everything, in another language. */
export function sayTotalsAgain() {
  summarized = -Infinity;
  if (latest) draw();
  else for (const tile of tiles) {
    put(tile.heading, say(tile.id));
    put(tile.number, say("none"));
  }
}

function draw() {
  const summarize = performance.now() - summarized > SUMMARY_EVERY_MS;
  if (summarize) summarized = performance.now();
  for (const tile of tiles) {
    const values = column(tile.column);
    const now = latest.totals[tile.column];
    const peak = values.reduce((most, value) => Math.max(most, value ?? 0), 0);
    put(tile.heading, say(tile.id));
    const [number, unit] = apart(written(tile, now));
    put(tile.number, number);
    put(tile.unitLabel, unit);
    put(tile.besideLabel, tile.beside(latest.snapshot));
    tile.peak = say("peak", { n: written(tile, peak) });
    tile.values = values;
    tile.plot.draw(values);
    if (summarize) mark(tile.host, "aria-label", say("plot", { name: say(tile.id), now: written(tile, now), peak: written(tile, peak) }));
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
  put(tile.left, say("ago", { time: at === undefined ? time(60 * Math.round((to - from) / 60)) : time(to - at) }));
  put(tile.right, at === undefined ? (tile.peak ?? "") : written(tile, tile.values?.[pointed]));
}

function tabulate() {
  const table = document.querySelector("#minutes table");
  const heads = [say("minutesAgo"), ...TOTALS.map(({ id }) => say(id))];
  table.tHead.replaceChildren(element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head))));
  const rows = [];
  for (let minute = 0; minute < MINUTES; minute += 1) {
    const index = indexBefore(60 * minute);
    if (index < 0) break;
    const cells = tiles.map((tile) => element("td", {}, written(tile, tile.values[index])));
    rows.push(element("tr", {}, element("th", { scope: "row" }, count(minute)), ...cells));
  }
  table.tBodies[0].replaceChildren(...rows);
}

document.querySelector("#minutes").addEventListener("toggle", () => latest && draw());
