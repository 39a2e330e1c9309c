// Keys of the store, for administrators: list, make, rotate, revoke. A new key's value is shown once.

import { element, setAttribute, setText } from "./element.js";
import { addPage, offerPage, poll, report, wordsOf } from "./router.js";
import { copyButton } from "./copy.js";
import { server } from "./server.js";
import { once, Table } from "./table.js";
import { count, date, rate, translate } from "./words.js";

const PATH = "v1/organization/api_keys";
const CONFIRM_MS = 5000;
const DAY_S = 86_400;
const LIMITS = ["requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"];

const form = document.querySelector("#access-form");
const made = document.querySelector("#access-made");
const announcer = document.querySelector("#access-status");
let reader = null;
let confirming = null;

function limits(row) {
  return LIMITS.filter((kind) => row[kind] !== null)
    .map((kind) => `${translate(kind)}: ${(kind.startsWith("cost") ? rate : count)(row[kind])}`).join(", ");
}

function actions({ id, name }, cell) {
  const buttons = once(cell, () => {
    const host = element("span", { class: "actions" }, element("button", { type: "button", class: "small" }), element("button", { type: "button", class: "small" }));
    host.firstChild.addEventListener("click", () => confirm("rotate", host.dataset.id, host.dataset.name));
    host.lastChild.addEventListener("click", () => confirm("revoke", host.dataset.id, host.dataset.name));
    return host;
  });
  Object.assign(buttons.dataset, { id, name });
  ["rotate", "revoke"].forEach((action, index) => {
    const isConfirming = confirming === `${action} ${id}`;
    setText(buttons.children[index], translate(isConfirming ? "drainConfirm" : action));
    setAttribute(buttons.children[index], "aria-label", translate(`${action}Of`, { name }));
  });
  return buttons;
}

const table = new Table(document.querySelector("#accesses"), [
  { head: "nameHead", show: ({ name }) => name, title: ({ id }) => id },
  { head: "valueHead", show: ({ redacted_value: shown }) => shown },
  { head: "person", show: ({ user }) => user ?? "" },
  { head: "team", show: ({ project_id: team }) => (team === "default" ? "" : team) },
  { head: "roleHead", show: ({ role }) => role },
  { head: "limits", show: limits },
  { head: "created", show: ({ created_at: at }) => date(at) },
  { head: "expires", show: ({ expires_at: at }) => (at === null ? translate("never") : date(at)) },
  { head: "actionsHead", show: actions },
], { keyOf: ({ id }) => id, empty: "noAccesses", label: "accesses" });

/** Rotate or revoke a key on the second click. */
async function confirm(action, id, name) {
  const wanted = `${action} ${id}`;
  if (confirming !== wanted) {
    confirming = wanted;
    announcer.textContent = translate(`${action}Confirm`, { name });
    table.draw();
    setTimeout(() => { if (confirming === wanted) { confirming = null; table.draw(); } }, CONFIRM_MS);
    return;
  }
  confirming = null;
  report("");
  const path = `${PATH}/${encodeURIComponent(id)}`;
  try {
    if (action === "revoke") await server.call(path, { method: "DELETE" });
    else showValue(await server.call(`${path}/rotate`, { method: "POST", json: {} }).then((response) => response.json()));
  } catch (error) {
    report(wordsOf(error));
  }
  reader?.now();
}

/** Show the value of a key, which the server does not know any more. */
function showValue({ name, value }) {
  made.replaceChildren(
    element("p", {}, translate("shownOnce", { name })),
    element("p", { class: "secret" }, element("code", {}, value), copyButton(() => value)),
  );
  made.hidden = false;
  made.focus();
}

async function make() {
  const fields = { name: form.elements.name.value.trim() };
  for (const name of ["user", "project_id"]) if (form.elements[name].value.trim()) fields[name] = form.elements[name].value.trim();
  fields.role = form.elements.role.value;
  if (form.elements.days.value) fields.expires_in_seconds = Number(form.elements.days.value) * DAY_S;
  for (const name of ["requests_per_minute", "tokens_per_day"]) if (form.elements[name].value) fields[name] = Number(form.elements[name].value);
  report("");
  try {
    showValue(await server.call(PATH, { method: "POST", json: fields }).then((response) => response.json()));
    form.reset();
  } catch (error) {
    report(wordsOf(error));
  }
  reader?.now();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  make();
});

/** Offer the page to administrators. */
export function offerAccesses(role) {
  offerPage("keys", role === "admin");
  made.replaceChildren();
  made.hidden = true;
  table.fill(null);
}

addPage("keys", "accesses", {
  start: () => { reader = poll(`${PATH}?limit=100&order=desc`, ({ data }) => table.fill(data)); return reader; },
  draw: () => table.draw(),
});
