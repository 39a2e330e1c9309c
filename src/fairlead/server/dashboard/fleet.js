// Models and nodes: a line each, updated in place, so that the focus and the scroll position are kept.

import { element, setAttribute, setText } from "./element.js";
import { server } from "./server.js";
import { bytes, count, percent, translate } from "./words.js";

const MAX_PIPS = 16;
const CONFIRM_MS = 5000;

const announcer = document.querySelector("#fleet-status");
const runningActions = new Set(); // for example "load qwen"
const problems = new Map(); // errors of the last actions, by line
let latest = null;
let mayControl = false; // until the server has named the role of the key

class Rows {
  /** One list. `make(name)` returns a line's parts, `fill(parts, status)` writes a status into them. */
  constructor(list, { make, fill, empty }) {
    this.list = list;
    this.make = make;
    this.fill = fill;
    this.empty = element("li", { class: "empty" });
    this.emptyWords = empty;
    this.lines = new Map();
  }

  show(statuses, nameOf) {
    const names = new Set(statuses.map(nameOf));
    for (const [name, parts] of this.lines) {
      if (names.has(name)) continue;
      parts.line.remove();
      this.lines.delete(name);
    }
    let before = null;
    for (const status of statuses) {
      const name = nameOf(status);
      if (!this.lines.has(name)) this.lines.set(name, this.make(name));
      const parts = this.lines.get(name);
      this.fill(parts, status);
      const wanted = before ? before.nextSibling : this.list.firstChild;
      if (parts.line !== wanted) this.list.insertBefore(parts.line, wanted);
      before = parts.line;
    }
    setText(this.empty, translate(this.emptyWords));
    if (statuses.length) this.empty.remove();
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
    parts.seats.line, parts.amount.line, parts.button, parts.problem,
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

const models = new Rows(document.querySelector("#models"), {
  empty: "noModels",
  make(name) {
    const parts = makeLine("model", name);
    parts.progress = element("progress", { max: "1" });
    parts.progress.hidden = true;
    parts.line.append(parts.progress);
    parts.button.addEventListener("click", () => toggle(name, parts));
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
    const unloads = LOADED.has(state) || state === "stopping";
    fillButton(parts.button, {
      words: translate(unloads ? "unload" : "load"),
      label: translate(unloads ? "unloadOf" : "loadOf", { name }),
      waits: IN_TRANSITION.has(state) || runningActions.has(`load ${name}`) || runningActions.has(`unload ${name}`),
    });
  },
});

function toggle(name, parts) {
  if (parts.button.getAttribute("aria-disabled")) return;
  const action = LOADED.has(parts.status) ? "unload" : "load";
  ask(`${action} ${name}`, `model ${name}`, `models/${action}`, { model: name });
}

// Nodes ----------------------------------------------------------------------------------------------

const nodes = new Rows(document.querySelector("#nodes"), {
  empty: "noNodes",
  make(name) {
    const parts = makeLine("node", name);
    parts.button.addEventListener("click", () => drain(name, parts));
    return parts;
  },
  fill(parts, status) {
    const { id: name, kind, models: served, remote } = status;
    // A local node is down whenever its model is not loaded, and the model's line shows the reason.
    const isLocal = kind !== "remote";
    const state = isLocal && status.state === "down" ? "stopped" : status.state;
    fillLine(parts, { ...status, state, problem: isLocal ? null : status.problem }, `node ${name}`);
    setText(parts.more, [remote?.url ?? translate(kind), served.length ? translate("serves", { models: served.join(", ") }) : ""].filter(Boolean).join(" · "));
    const load = remote?.load ?? null;
    setShownAndSpoken(parts.amount, load === null ? ["", ""] : [`${percent(load)}%`, translate("loadIs", { n: percent(load) })]);
    parts.button.hidden = !mayControl || isLocal || state === "draining" || state === "down"; // local ones are unloaded
    fillButton(parts.button, {
      words: translate(parts.isConfirming ? "drainConfirm" : "drain"),
      label: translate(parts.isConfirming ? "drainConfirmOf" : "drainOf", { name }),
      waits: runningActions.has(`drain ${name}`),
    });
  },
});

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

function draw() {
  if (!latest) return;
  models.show(latest.models, ({ model }) => model);
  nodes.show(latest.nodes, ({ id }) => id);
}
