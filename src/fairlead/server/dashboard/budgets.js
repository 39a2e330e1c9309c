// Budgets, for administrators: what is used of each, and when it renews; set and remove those of users and teams.

import { element, setAttribute, setText } from "./element.js";
import { limitList } from "./limits.js";
import { addPage, offerPage, poll, report, wordsOf } from "./router.js";
import { server } from "./server.js";
import { once, Table } from "./table.js";
import { translate } from "./words.js";

const PATH = "v1/organization/budgets";
const CONFIRM_MS = 5000;
const LIMITS = ["tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"];

const form = document.querySelector("#budget-form");
const fields = document.querySelector("#budget-fields");
const announcer = document.querySelector("#budgets-status");
let reader = null;
let confirming = null;

const kindOf = ({ user, team }) => (user !== null ? "user" : team !== null ? "team" : "key");
const nameOf = (row) => row.user ?? row.team ?? row.api_key_name ?? row.api_key_id;
const KIND_WORDS = { user: "person", team: "team", key: "keyHead" };

function actions(row, cell) {
  const buttons = once(cell, () => {
    const host = element("span", { class: "actions" }, element("button", { type: "button", class: "small" }), element("button", { type: "button", class: "small" }));
    host.firstChild.addEventListener("click", () => edit(cell.row));
    host.lastChild.addEventListener("click", () => remove(cell.row));
    return host;
  });
  cell.row = row;
  const name = nameOf(row);
  const [change, end] = buttons.children;
  setText(change, translate("edit"));
  setAttribute(change, "aria-label", translate("editBudgetOf", { name }));
  change.hidden = kindOf(row) === "key";
  setText(end, translate(confirming === row.id ? "drainConfirm" : "remove"));
  setAttribute(end, "aria-label", translate("removeBudgetOf", { name }));
  end.hidden = change.hidden || row.source !== "store";
  return buttons;
}

const table = new Table(document.querySelector("#budgets"), [
  { head: "nameHead", show: nameOf, title: ({ api_key_id: id }) => id },
  { head: "kind", show: (row) => translate(KIND_WORDS[kindOf(row)]) },
  { head: "budgets", show: ({ uses }, cell) => limitList(uses, cell) },
  { head: "setIn", show: ({ source }) => translate(`source_${source}`) },
  { head: "actionsHead", show: actions },
], { keyOf: ({ id }) => id, empty: "noBudgets", label: "budgets" });

/** Fill the form with a budget, to change it. */
function edit(row) {
  fields.open = true;
  form.elements.kind.value = kindOf(row);
  form.elements.name.value = nameOf(row);
  for (const name of LIMITS) form.elements[name].value = row[name] ?? "";
  form.elements[LIMITS[0]].focus();
}

/** Remove a budget on the second click. */
async function remove({ id, ...row }) {
  if (confirming !== id) {
    confirming = id;
    announcer.textContent = translate("removeBudgetConfirm", { name: nameOf(row) });
    table.draw();
    setTimeout(() => { if (confirming === id) { confirming = null; table.draw(); } }, CONFIRM_MS);
    return;
  }
  confirming = null;
  await change(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" });
}

async function set() {
  const json = { [form.elements.kind.value]: form.elements.name.value.trim() };
  for (const name of LIMITS) if (form.elements[name].value) json[name] = Number(form.elements[name].value);
  if (await change(PATH, { method: "POST", json })) form.reset();
}

/** Send a change, and read all budgets again. Return whether it was made; why not is above the page. */
async function change(path, options) {
  report("");
  try {
    await server.call(path, options);
    return true;
  } catch (error) {
    report(wordsOf(error));
    return false;
  } finally {
    reader?.now();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  set();
});

/** Offer the page to administrators. */
export function offerBudgets(role) {
  offerPage("budgets", role === "admin");
  table.fill(null);
}

addPage("budgets", "budgets", {
  start: () => { reader = poll(PATH, ({ data }) => table.fill(data)); return reader; },
  draw: () => table.draw(),
});
