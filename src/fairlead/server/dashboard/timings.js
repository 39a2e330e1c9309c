// Latency and errors: how long requests took and how they ended, in a chosen window.

import { Chart } from "./chart.js";
import { element, setText } from "./element.js";
import { outcomeWords } from "./requests.js";
import { addPage, poll } from "./router.js";
import { Table } from "./table.js";
import { count, hasText, milliseconds, time, translate } from "./words.js";

const MEASURES = ["first_token", "token_gap", "wait"];
const EXPECTED = new Set(["success", "client_left", "cancelled"]);
const LINES = 5; // the other errors are drawn as one

let latest = null;
let totals = null;
let isOwn = false;

const short = (seconds) => (seconds === null ? "" : seconds < 1 ? milliseconds(seconds) : time(seconds));

/** A choice of the window, and the poll of a page that has one. `onData` gets what the server has. */
function windowed(picker, onData) {
  let reader = null;
  picker.addEventListener("change", () => reader?.now());
  return () => {
    reader = poll(() => `timings?window=${picker.value}`, onData);
    return reader;
  };
}

function fillWindows(picker) {
  [...picker.options].forEach((option) => setText(option, translate(`window_${option.value}`)));
}

// Latency --------------------------------------------------------------------------------------------

const latencyWindow = document.querySelector("#latency-window");
const latencyClass = document.querySelector("#latency-class");
const charts = MEASURES.map((measure) => {
  const heading = element("h3");
  const host = element("div", { class: "chart-host" });
  document.querySelector("#latency-charts").append(element("section", { class: "chart-box" }, heading, host));
  return { measure, heading, chart: new Chart(host, { show: short }) };
});

const quantiles = (measure) => ["p50", "p95"].map((part) => ({
  head: `${measure}_${part}`, number: true, show: (row) => short(row[measure][part]),
}));

const latencyTable = new Table(document.querySelector("#latency"), [
  { head: "model", show: ({ model }) => model || translate("allModels") },
  { head: "classHead", show: ({ priority }) => (priority === null ? translate("allClasses") : latest.classes[priority] ?? "") },
  { head: "requests", number: true, show: (row) => count(row.wait.count) },
  ...MEASURES.flatMap(quantiles),
], { keyOf: ({ model, priority }) => `${model} ${priority}`, empty: "noTimings", label: "latency" });

function drawLatency() {
  fillWindows(latencyWindow);
  setText(document.querySelector("#latency-own"), isOwn ? translate("ownOnly") : "");
  if (!latest) return latencyTable.draw();
  const classes = latest.series.map(({ priority }) => priority);
  const offered = classes.map((priority) => [priority === null ? "" : String(priority), priority === null ? translate("allClasses") : latest.classes[priority] ?? ""]);
  if (latencyClass.dataset.offered !== JSON.stringify(offered)) {
    latencyClass.dataset.offered = JSON.stringify(offered);
    const chosen = latencyClass.value;
    latencyClass.replaceChildren(...offered.map(([value, words]) => element("option", { value }, words)));
    latencyClass.value = offered.some(([value]) => value === chosen) ? chosen : "";
  }
  const series = latest.series.find(({ priority }) => String(priority ?? "") === latencyClass.value) ?? latest.series[0];
  for (const { measure, heading, chart } of charts) {
    setText(heading, translate(measure));
    chart.draw(latest.starts, [
      { name: translate("median"), values: series[measure].map(({ p50 }) => p50) },
      { name: translate("p95"), values: series[measure].map(({ p95 }) => p95), dashed: true },
    ], translate("chartOf", { name: translate(measure), window: translate(`window_${latencyWindow.value}`) }));
  }
  latencyTable.fill(latest.rows);
  return undefined;
}

latencyClass.addEventListener("change", drawLatency);
addPage("latency", "latency", {
  start: windowed(latencyWindow, (found) => { latest = found; drawLatency(); }),
  draw: drawLatency,
});

// Errors ---------------------------------------------------------------------------------------------

const errorsWindow = document.querySelector("#errors-window");
const errorsChart = new Chart(document.querySelector("#errors-chart"), { show: count, bars: true });
/** Return what a code means, in the words of the chat or others. */
function meaningOf(code) {
  const key = [`meaning_${code}`, code].find(hasText);
  return key === undefined ? "" : translate(key, { wait: "…", reason: "…" });
}

const errorsTable = new Table(document.querySelector("#errors"), [
  { head: "kind", show: ({ code }) => outcomeWords(code), title: ({ code }) => code },
  { head: "meaning", show: ({ code }) => meaningOf(code) },
  { head: "inWindow", number: true, show: ({ recent }) => count(recent) },
  { head: "sinceStart", number: true, show: ({ all }) => (all === null ? "" : count(all)) },
], { keyOf: ({ code }) => code, empty: "noErrors", label: "errors" });

/** Show a snapshot: it counts the errors of all since the start, also of requests refused before the queue. */
export function showErrors({ rejected, failed }) {
  totals = { ...rejected, ...failed };
  if (!document.querySelector("#page-errors").hidden) drawErrors();
}

/** Say whether the key sees only its own requests. */
export function seeOwn(role) {
  isOwn = role === "user";
  latest = null;
}

function drawErrors() {
  fillWindows(errorsWindow);
  setText(document.querySelector("#errors-own"), isOwn ? translate("ownOnly") : "");
  if (!latest) return errorsTable.draw();
  const sum = (values) => values.reduce((all, n) => all + n, 0);
  const recent = Object.entries(latest.outcomes).filter(([code]) => !EXPECTED.has(code));
  recent.sort(([, one], [, other]) => sum(other) - sum(one));
  const lines = recent.slice(0, LINES).map(([code, values]) => ({ name: outcomeWords(code), values }));
  const rest = recent.slice(LINES).map(([, values]) => values);
  if (rest.length) lines.push({ name: translate("otherErrors"), values: latest.starts.map((_, index) => sum(rest.map((values) => values[index]))) });
  document.querySelector("#errors-chart").hidden = !lines.length;
  if (lines.length) errorsChart.draw(latest.starts, lines, translate("chartOf", { name: translate("errors"), window: translate(`window_${errorsWindow.value}`) }));
  const counted = Object.fromEntries(recent.map(([code, values]) => [code, sum(values)]));
  const codes = new Set([...Object.keys(counted), ...Object.keys(totals ?? {}).filter((code) => totals[code])]);
  errorsTable.fill([...codes].filter((code) => !EXPECTED.has(code))
    .map((code) => ({ code, recent: counted[code] ?? 0, all: totals ? totals[code] ?? 0 : null }))
    .sort((one, other) => other.recent - one.recent || (other.all ?? 0) - (one.all ?? 0)));
  return undefined;
}

addPage("errors", "errors", {
  start: windowed(errorsWindow, (found) => { latest = found; drawErrors(); }),
  draw: drawErrors,
});
