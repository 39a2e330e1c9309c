// Requests: those that wait and run, and the last ones that ended, with filters. Operators may cancel any.

import { element, setAttribute, setText } from "./element.js";
import { addPage, poll, report, wordsOf } from "./router.js";
import { server } from "./server.js";
import { once, Table } from "./table.js";
import { count, hasText, rate, time, translate } from "./words.js";
import { clock } from "./chart.js";

const CONFIRM_MS = 4000;
const PAGE = 100;
const FILTERS = ["state", "model", "tenant", "priority", "node", "outcome"];

const host = document.querySelector("#requests");
const form = document.querySelector("#request-filters");
const totals = document.querySelector("#request-totals");
const more = document.querySelector("#requests-more");
const announcer = document.querySelector("#requests-status");
const known = Object.fromEntries(FILTERS.map((name) => [name, new Set()]));
const canceling = new Set();
let limit = PAGE;
let confirming = null;
let latest = null;
let reader = null;

/** Return the words of an outcome, which may be any code of an error. */
export const outcomeWords = (code) => (hasText(`outcome_${code}`) ? translate(`outcome_${code}`) : code);

function where({ state, position, estimated_wait_s: left, node }) {
  if (state !== "waiting") return node ?? "";
  if (position === null) return "";
  return left === null ? translate("place", { n: count(position) }) : translate("placeLeft", { n: count(position), wait: time(left) });
}

function stateCell({ state }, cell) {
  const line = once(cell, () => element("span", { class: "state" }, element("span", { class: "dot", "aria-hidden": "true" }), element("span")));
  setAttribute(line, "data-state", { waiting: "queued", running: "up", ended: "over" }[state]);
  setText(line.lastChild, translate(state));
  return line;
}

function outcomeCell({ outcome, problem, attempts }, cell) {
  const line = once(cell, () => element("span", { class: "why" }, element("span"), element("span", { class: "aside" })));
  setText(line.firstChild, outcome === null ? "" : outcomeWords(outcome));
  setText(line.lastChild, [problem, attempts > 1 ? translate("attempts", { n: count(attempts) }) : ""].filter(Boolean).join(" · "));
  line.classList.toggle("problem", !["success", "client_left", "cancelled", null].includes(outcome));
  return line;
}

function cancelCell({ id, may_cancel: mayCancel }, cell) {
  const button = once(cell, () => {
    const made = element("button", { type: "button", class: "small" });
    made.addEventListener("click", () => cancel(made.dataset.id));
    return made;
  });
  button.dataset.id = id;
  button.hidden = !mayCancel;
  setText(button, translate(confirming === id ? "drainConfirm" : "cancel"));
  setAttribute(button, "aria-label", translate(confirming === id ? "cancelConfirmOf" : "cancelOf", { id }));
  setAttribute(button, "aria-disabled", canceling.has(id) ? "true" : null);
  return button;
}

const table = new Table(host, [
  { head: "arrived", show: ({ arrived_at: at }) => clock(at, 1), title: ({ id }) => id },
  { head: "stateHead", show: stateCell },
  { head: "person", show: ({ tenant, team }) => (team ? `${tenant} · ${team}` : tenant), title: ({ key }) => key },
  { head: "model", show: ({ model }) => model, title: ({ route }) => route },
  { head: "classHead", show: ({ priority }) => priority },
  { head: "nodeOrPlace", show: where },
  { head: "waitHead", number: true, show: ({ wait_s: wait }) => time(wait) },
  { head: "firstToken", number: true, show: ({ first_token_s: first }) => (first === null ? "" : time(first)) },
  { head: "took", number: true, show: ({ took_s: took }) => time(took) },
  { head: "tokensHead", number: true, show: ({ tokens }) => count(tokens), title: (row) => translate("promptOf", { n: count(row.prompt_tokens), cached: count(row.cached_tokens ?? 0) }) },
  { head: "rateHead", number: true, show: ({ tokens_per_s: perS }) => (perS === null ? "" : rate(perS)) },
  { head: "outcomeHead", show: outcomeCell },
  { head: "actionsHead", show: cancelCell },
], { keyOf: ({ id, arrived_at: at, state }) => (state === "ended" ? `${id} ${at}` : id), empty: "noRequests", label: "requests" });

/** Cancel a request on the second click: it may be somebody else's. */
async function cancel(id) {
  if (canceling.has(id)) return;
  if (confirming !== id) {
    confirming = id;
    announcer.textContent = translate("cancelConfirmOf", { id });
    table.draw();
    setTimeout(() => { if (confirming === id) { confirming = null; table.draw(); } }, CONFIRM_MS);
    return;
  }
  confirming = null;
  report("");
  canceling.add(id);
  table.draw();
  try {
    await server.call(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
    announcer.textContent = translate("outcome_cancelled");
  } catch (error) {
    report(wordsOf(error));
  } finally {
    canceling.delete(id);
    reader?.now();
  }
}

function path() {
  const query = new URLSearchParams({ limit: String(limit) });
  for (const name of FILTERS) if (form.elements[name].value) query.set(name, form.elements[name].value);
  return `v1/requests?${query}`;
}

function show(found) {
  latest = found;
  for (const row of found.data) {
    for (const name of ["model", "tenant", "priority", "node", "outcome"]) if (row[name]) known[name].add(row[name]);
  }
  draw();
}

function draw() {
  for (const name of FILTERS) fillFilter(form.elements[name], name);
  table.fill(latest?.data ?? null);
  setText(totals, latest ? translate("requestTotals", { waiting: count(latest.waiting), running: count(latest.running) }) : "");
  const ended = latest?.data.filter(({ state }) => state === "ended").length ?? 0;
  const open = (latest?.data.length ?? 0) - ended;
  more.hidden = limit >= 1000 || Math.max(ended, open) < limit;
  setText(more, translate("more"));
}

/** Offer what has been seen so far, and keep what is chosen. */
function fillFilter(picker, name) {
  const fixed = name === "state" ? ["waiting", "running", "ended"] : name === "outcome" ? ["failed"] : [];
  const values = [...fixed, ...[...known[name]].sort().filter((value) => !fixed.includes(value))];
  const words = (value) => (name === "state" ? translate(value) : name === "outcome" ? outcomeWords(value) : value);
  const offered = [["", translate("all")], ...values.map((value) => [value, words(value)])];
  const seen = JSON.stringify(offered);
  if (picker.dataset.offered === seen) return;
  picker.dataset.offered = seen;
  const chosen = picker.value;
  picker.replaceChildren(...offered.map(([value, shown]) => element("option", { value }, shown)));
  picker.value = chosen;
}

form.addEventListener("change", () => { limit = PAGE; reader?.now(); });
form.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", () => { limit = 1000; reader?.now(); });
server.addEventListener("key", () => { latest = null; for (const values of Object.values(known)) values.clear(); });

addPage("requests", "requests", {
  start: () => { reader = poll(path, show); return reader; },
  draw,
});
