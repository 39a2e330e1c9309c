// Usage by day, from the store: requests, tokens, time of seats and costs, by team, user, key or model.

import { Chart } from "./chart.js";
import { element, setText } from "./element.js";
import { addPage, report, wordsOf } from "./router.js";
import { server } from "./server.js";
import { Table } from "./table.js";
import { count, rate, time, translate } from "./words.js";

const DAY_S = 86_400;
const KINDS = ["completions", "embeddings", "audio_speeches"];
const EVERY_MS = 10_000; // the store gets what was used once a second
const LINES = 5;
const COST_GROUPS = { model: "line_item", outcome: null, route: null };

const days = document.querySelector("#usage-days");
const by = document.querySelector("#usage-by");
const what = document.querySelector("#usage-what");
const chart = new Chart(document.querySelector("#usage-chart"), { show: rate, bars: true });
let latest = null;

const table = new Table(document.querySelector("#usage"), [
  { head: "groupHead", show: ({ name }) => name || "–" },
  { head: "requests", number: true, show: ({ sums }) => count(sums.requests) },
  { head: "promptTokens", number: true, show: ({ sums }) => count(sums.prompt) },
  { head: "cachedTokens", number: true, show: ({ sums }) => count(sums.cached) },
  { head: "generatedTokens", number: true, show: ({ sums }) => count(sums.generated) },
  { head: "seatTime", number: true, show: ({ sums }) => time(sums.seats) },
  { head: "cost", number: true, show: ({ sums }) => (sums.cost === null ? "" : rate(sums.cost)) },
], { keyOf: ({ name }) => name, empty: "noUsage", label: "usage" });

/** Return all results of a path with their buckets' starts, page after page. */
async function results(path, query, signal) {
  const found = [];
  const parameters = new URLSearchParams(query);
  for (;;) {
    const page = await server.call(`${path}?${parameters}`, { signal }).then((response) => response.json());
    for (const { start_time: at, results: rows } of page.data) for (const row of rows) found.push({ at, ...row });
    if (!page.has_more) return found;
    parameters.set("page", page.next_page);
  }
}

async function load(signal) {
  const now = Math.floor(Date.now() / 1000);
  const start = Math.floor(now / DAY_S) * DAY_S - (Number(days.value) - 1) * DAY_S;
  const group = by.value;
  const query = { start_time: start, end_time: now + 1, limit: 31, group_by: group };
  const costGroup = group in COST_GROUPS ? COST_GROUPS[group] : group;
  const costs = { ...query, limit: 180 };
  if (costGroup) costs.group_by = costGroup;
  else delete costs.group_by;
  const [spent, ...usages] = await Promise.all([
    costGroup ? results("v1/organization/costs", costs, signal) : [],
    ...KINDS.map((kind) => results(`v1/organization/usage/${kind}`, query, signal)),
  ]);
  const rows = usages.flat().map((row) => ({
    at: row.at,
    name: row[group] ?? "",
    requests: row.num_model_requests,
    prompt: row.input_tokens ?? 0,
    cached: row.input_cached_tokens ?? 0,
    generated: row.output_tokens ?? 0,
    seats: row.seat_seconds,
    cost: 0,
  }));
  const paid = spent.map((row) => ({ at: row.at, name: row[costGroup] ?? "", requests: 0, prompt: 0, cached: 0, generated: 0, seats: 0, cost: row.amount.value }));
  const starts = Array.from({ length: Number(days.value) }, (_, index) => start + index * DAY_S);
  return { starts, rows: [...rows, ...paid], hasCosts: Boolean(costGroup) };
}

function sumsOf(rows, hasCosts) {
  const sums = { requests: 0, prompt: 0, cached: 0, generated: 0, seats: 0, cost: 0 };
  for (const row of rows) for (const name of Object.keys(sums)) sums[name] += row[name];
  return { ...sums, tokens: sums.prompt + sums.generated, cost: hasCosts ? sums.cost : null };
}

function draw() {
  for (const picker of [days, by, what]) [...picker.options].forEach((option) => setText(option, translate(`usage_${option.value}`, { n: option.value })));
  if (!latest) return table.draw();
  const names = [...new Set(latest.rows.map(({ name }) => name))];
  const groups = names.map((name) => {
    const rows = latest.rows.filter((row) => row.name === name);
    return { name, rows, sums: sumsOf(rows, latest.hasCosts) };
  });
  const value = (sums) => sums[what.value] ?? 0;
  groups.sort((one, other) => value(other.sums) - value(one.sums) || other.sums.requests - one.sums.requests);
  const byDay = (rows) => latest.starts.map((at) => value(sumsOf(rows.filter((row) => row.at === at), latest.hasCosts)));
  const lines = groups.slice(0, LINES).map(({ name, rows }) => ({ name: name || "–", values: byDay(rows) }));
  const rest = groups.slice(LINES).flatMap(({ rows }) => rows);
  if (rest.length) lines.push({ name: translate("otherGroups"), values: byDay(rest) });
  document.querySelector("#usage-chart").hidden = !lines.length;
  if (lines.length) chart.draw(latest.starts, lines, translate("chartOf", { name: translate(`usage_${what.value}`), window: translate("usage_days", { n: days.value }) }));
  table.fill(groups);
  return undefined;
}

/** Read the usage now, and again each `EVERY_MS`. */
function start() {
  let controller = new AbortController();
  let timer = 0;
  const read = async () => {
    clearTimeout(timer);
    controller.abort();
    const mine = controller = new AbortController();
    try {
      const found = await load(mine.signal);
      if (mine !== controller || mine.signal.aborted) return;
      latest = found;
      report("", "data");
      draw();
    } catch (error) {
      if (mine.signal.aborted) return;
      report(wordsOf(error), "data");
    }
    timer = setTimeout(read, EVERY_MS);
  };
  const pickers = [days, by];
  for (const picker of pickers) picker.addEventListener("change", read);
  server.addEventListener("key", read);
  read();
  return () => {
    clearTimeout(timer);
    controller.abort();
    for (const picker of pickers) picker.removeEventListener("change", read);
    server.removeEventListener("key", read);
  };
}

what.addEventListener("change", draw);
server.addEventListener("key", () => { latest = null; });
addPage("usage", "usage", { start, draw });
