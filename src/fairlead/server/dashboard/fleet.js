// Models, and below each the remote nodes that serve it: a line each, updated in place, so that the focus and
// the scroll position are kept. A local node is its model's line.

import { element, setAttribute, setText } from "./element.js";
import { openLog } from "./log.js";
import { server } from "./server.js";
import { bytes, count, percent, translate } from "./words.js";

const MAX_PIPS = 16;
const CONFIRM_MS = 5000;

const announcer = document.querySelector("#fleet-status");
const runningActions = new Set(); // for example "load qwen"
const problems = new Map(); // errors of the last actions, by line
let latest = null;
let mayControl = false; // until the server has named the role of the key

/**
 * The list. `kinds` have for each kind of line `make(name)`, which returns its parts, and `fill(parts, status)`,
 * which writes a status into them.
 */
class Rows {
  constructor(list, { kinds, empty }) {
    this.list = list;
    this.kinds = kinds;
    this.empty = element("li", { class: "empty" });
    this.emptyWords = empty;
    this.lines = new Map();
  }

  /** Show entries, each a kind, a name and a status, in this order. */
  show(entries) {
    const ids = new Set(entries.map(([kind, name]) => `${kind} ${name}`));
    for (const [id, parts] of this.lines) {
      if (ids.has(id)) continue;
      parts.line.remove();
      this.lines.delete(id);
    }
    let before = null;
    for (const [kind, name, status] of entries) {
      const id = `${kind} ${name}`;
      if (!this.lines.has(id)) this.lines.set(id, this.kinds[kind].make(name));
      const parts = this.lines.get(id);
      this.kinds[kind].fill(parts, status);
      const wanted = before ? before.nextSibling : this.list.firstChild;
      if (parts.line !== wanted) this.list.insertBefore(parts.line, wanted);
      before = parts.line;
    }
    setText(this.empty, translate(this.emptyWords));
    if (entries.length) this.empty.remove();
    else if (!this.empty.isConnected) this.list.append(this.empty);
  }
}

/** Add to a line a short text that is shown, and a longer one for screen readers. */
function addShownAndSpoken(line) {
  const [shown, spoken] = [element("span", { "aria-hidden": "true" }), element("span", { class: "visually-hidden" })];
  line.append(shown, spoken);
  return { line, shown, spoken };
}

function setShownAndSpoken({ shown, spoken }, [short, words]) {
  setText(shown, short);
  setText(spoken, words);
}

function makeLine(kind, name) {
  const parts = {
    words: element("span"),
    more: element("span"),
    pips: element("span", { class: "pips", "aria-hidden": "true" }),
    seats: addShownAndSpoken(element("p", { class: "seats" })),
    amount: addShownAndSpoken(element("p", { class: "amount" })),
    button: element("button", { class: "action", type: "button" }),
    problem: element("p", { class: "problem", hidden: "" }),
  };
  parts.state = element("p", { class: "state" }, element("span", { class: "dot", "aria-hidden": "true" }), parts.words, parts.more);
  parts.line = element(
    "li", { class: "row", [`data-${kind}`]: name },
    element("div", { class: "identity" }, element("p", { class: "name" }, name), parts.state),
    parts.seats.line, parts.amount.line, element("span", { class: "actions" }, parts.button), parts.problem,
  );
  parts.seats.line.prepend(parts.pips);
  return parts;
}

function fillLine(parts, { state, seats, busy, problem }, id) {
  parts.status = state;
  setAttribute(parts.state, "data-state", state);
  setText(parts.words, translate(state));
  fillPips(parts.pips, busy, seats);
  const taken = { busy: count(busy), seats: count(seats) };
  setShownAndSpoken(parts.seats, seats ? [`${taken.busy} / ${taken.seats}`, translate("seatsTaken", taken)] : ["", ""]);
  const shownProblem = problems.get(id) ?? problem ?? "";
  setText(parts.problem, shownProblem);
  parts.problem.hidden = !shownProblem;
}

function fillPips(pips, busy, seats) {
  const shown = seats <= MAX_PIPS ? seats : 0;
  while (pips.children.length > shown) pips.lastChild.remove();
  while (pips.children.length < shown) pips.append(element("i"));
  [...pips.children].forEach((pip, index) => pip.classList.toggle("busy", index < busy));
}

/** Set a button's words; `label` has the name, too, for screen readers. */
function fillButton(button, { words, label, waits }) {
  setText(button, words);
  setAttribute(button, "aria-label", label);
  setAttribute(button, "aria-disabled", waits ? "true" : null); // a disabled button would lose the focus
}

// Models ---------------------------------------------------------------------------------------------

const LOADED = new Set(["ready", "draining"]);
const IN_TRANSITION = new Set(["loading", "stopping"]);

const models = {
  make(name) {
    const parts = makeLine("model", name);
    parts.progress = element("progress", { max: "1" });
    parts.progress.hidden = true;
    parts.line.append(parts.progress);
    parts.button.addEventListener("click", () => toggle(name, parts));
    parts.log = element("button", { class: "action log", type: "button", hidden: "" });
    parts.log.addEventListener("click", () => openLog(name));
    parts.button.before(parts.log);
    return parts;
  },
  fill(parts, status) {
    fillLine(parts, status, `model ${status.model}`);
    const { model: name, kind, state, load: { progress, stage }, memory_bytes: memory } = status;
    const loading = state === "loading";
    const progressText = progress === null ? "" : `${percent(progress)}% `;
    setText(parts.more, loading ? progressText + stage : translate(kind));
    setShownAndSpoken(parts.amount, memory ? [bytes(memory), translate("memory", { n: bytes(memory) })] : ["", ""]);
    parts.progress.hidden = !loading;
    if (progress === null) parts.progress.removeAttribute("value"); // indeterminate
    else parts.progress.value = progress;
    setAttribute(parts.progress, "aria-label", translate("loadProgress", { name }));
    parts.button.hidden = kind === "remote" || !mayControl;
    parts.log.hidden = parts.button.hidden;
    fillButton(parts.log, { words: translate("log"), label: translate("logOf", { name }), waits: false });
    const unloads = LOADED.has(state) || state === "stopping";
    fillButton(parts.button, {
      words: translate(unloads ? "unload" : "load"),
      label: translate(unloads ? "unloadOf" : "loadOf", { name }),
      waits: IN_TRANSITION.has(state) || runningActions.has(`load ${name}`) || runningActions.has(`unload ${name}`),
    });
  },
};

function toggle(name, parts) {
  if (parts.button.getAttribute("aria-disabled")) return;
  const action = LOADED.has(parts.status) ? "unload" : "load";
  ask(`${action} ${name}`, `model ${name}`, `models/${action}`, { model: name });
}

// Nodes ----------------------------------------------------------------------------------------------

const nodes = {
  make(name) {
    const parts = makeLine("node", name);
    parts.line.classList.add("node");
    parts.button.addEventListener("click", () => drain(name, parts));
    return parts;
  },
  fill(parts, status) {
    const { id: name, state, models: served, remote } = status;
    fillLine(parts, status, `node ${name}`);
    setText(parts.more, [remote?.url ?? "", served.length ? translate("serves", { models: served.join(", ") }) : ""].filter(Boolean).join(" · "));
    const load = remote?.load ?? null;
    setShownAndSpoken(parts.amount, load === null ? ["", ""] : [`${percent(load)}%`, translate("loadIs", { n: percent(load) })]);
    parts.button.hidden = !mayControl || state === "draining" || state === "down";
    fillButton(parts.button, {
      words: translate(parts.isConfirming ? "drainConfirm" : "drain"),
      label: translate(parts.isConfirming ? "drainConfirmOf" : "drainOf", { name }),
      waits: runningActions.has(`drain ${name}`),
    });
  },
};

/** Drain a node on the second click, because draining cannot be undone. */
function drain(name, parts) {
  if (parts.button.getAttribute("aria-disabled")) return;
  if (!parts.isConfirming) {
    parts.isConfirming = true;
    announcer.textContent = translate("drainConfirmOf", { name });
    setTimeout(() => { parts.isConfirming = false; draw(); }, CONFIRM_MS);
    draw();
    return;
  }
  parts.isConfirming = false;
  ask(`drain ${name}`, `node ${name}`, `nodes/${encodeURIComponent(name)}/drain`);
}

// Both -----------------------------------------------------------------------------------------------

async function ask(what, id, path, json) {
  runningActions.add(what);
  problems.delete(id);
  draw();
  try {
    await server.call(path, { method: "POST", json });
  } catch (error) {
    problems.set(id, error.message || translate("unreachable"));
    announcer.textContent = problems.get(id);
  } finally {
    runningActions.delete(what);
    draw();
  }
}

/** Offer the buttons that a key with this role may use; the server refuses the requests of others anyway. */
export function offerActions(role) {
  mayControl = role !== "user";
  draw();
}

/** Show a snapshot, and announce the models with a new state. */
export function showFleet(snapshot) {
  const earlier = new Map(latest?.models.map(({ model, state }) => [model, state]));
  const changed = latest ? snapshot.models.filter(({ model, state }) => earlier.get(model) !== state) : [];
  latest = snapshot;
  draw();
  if (changed.length) {
    announcer.textContent = changed.map(({ model, state }) => translate("stateOf", { name: model, state: translate(state) })).join(". ");
  }
}

/** Redraw everything, in another language. */
export const redrawFleet = () => draw();

const list = new Rows(document.querySelector("#models"), { kinds: { model: models, node: nodes }, empty: "noModels" });

/** Return the lines in order: each model, then the remote nodes of which it is the first model. */
function entriesOf({ models: known, nodes: all }) {
  const remote = all.filter(({ kind }) => kind === "remote");
  const names = new Set(known.map(({ model }) => model));
  const firstOf = (node) => node.models.find((model) => names.has(model));
  const line = (node) => ["node", node.id, node];
  const entries = known.flatMap((status) => [
    ["model", status.model, status], ...remote.filter((node) => firstOf(node) === status.model).map(line),
  ]);
  return [...entries, ...remote.filter((node) => firstOf(node) === undefined).map(line)];
}

function draw() {
  if (latest) list.show(entriesOf(latest));
}
