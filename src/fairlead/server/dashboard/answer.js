// The parts of one answer, in the order in which they arrive: reasoning, which is folded, text and tool calls.
// All of it is text of a model, so it is never parsed as HTML.

import { element, setText } from "./element.js";
import { elementsOf } from "./markdown.js";
import { time, translate } from "./words.js";

const ONE_LINE_CHARS = 60; // of an argument's JSON

/** The parts as elements in `body`. A part that has changed is drawn by `draw`. */
export class AnswerParts {
  constructor() {
    this.body = element("div", { class: "parts" });
    this.parts = [];
    this.calls = new Map(); // by their index in the response
  }

  /** Add a delta of a response; return whether it has any output. */
  add(delta) {
    const reasoning = textOf(delta.reasoning_content) || textOf(delta.reasoning);
    if (reasoning) this.last(Reasoning).add(reasoning);
    if (textOf(delta.content)) this.last(Content).add(delta.content);
    const calls = Array.isArray(delta.tool_calls) ? delta.tool_calls : [];
    for (const call of calls) this.call(call?.index ?? 0).add(call?.function ?? {});
    return Boolean(reasoning || textOf(delta.content) || calls.length);
  }

  /** The answer's text, without reasoning and calls. */
  get text() {
    return this.parts.map((part) => (part instanceof Content ? part.text : "")).join("");
  }

  get isThinking() {
    return this.parts.at(-1) instanceof Reasoning;
  }

  get isEmpty() {
    return !this.parts.length;
  }

  /** The text for screen readers: the answer's text, else the names of the called functions. */
  get spoken() {
    return this.text || [...this.calls.values()].map(({ name }) => `${translate("toolCall")} ${name}`).join("\n");
  }

  draw() {
    for (const part of this.parts) part.draw();
  }

  /** End the answer, which may be incomplete. */
  end() {
    this.parts.at(-1)?.end();
    this.draw();
  }

  /** Return the last part if it is of this kind, else a new one. */
  last(Kind) {
    const last = this.parts.at(-1);
    return last instanceof Kind ? last : this.begin(new Kind());
  }

  call(index) {
    if (!this.calls.has(index)) this.calls.set(index, this.begin(new ToolCall()));
    return this.calls.get(index);
  }

  begin(part) {
    this.parts.at(-1)?.end();
    this.parts.push(part);
    this.body.append(part.element);
    return part;
  }
}

class Content {
  constructor() {
    this.element = element("div", { class: "text" });
    this.text = "";
  }

  add(text) {
    this.text += text;
    this.changed = true;
  }

  end() {}

  draw() {
    if (this.changed) this.element.replaceChildren(...elementsOf(this.text));
    this.changed = false;
  }
}

class Reasoning {
  /** Reasoning: folded, with its duration when it has ended. */
  constructor() {
    this.began = performance.now();
    this.summary = element("summary", {}, translate("thinking"));
    this.shown = document.createTextNode("");
    this.element = element("details", { class: "reasoning running" }, this.summary, element("p", {}, this.shown));
    this.added = "";
  }

  add(text) {
    this.added += text;
  }

  end() {
    if (!this.element.classList.contains("running")) return;
    this.element.classList.remove("running");
    setText(this.summary, translate("thought", { time: time((performance.now() - this.began) / 1000) }));
  }

  draw() {
    if (this.added) this.shown.appendData(this.shown.data ? this.added : this.added.trimStart());
    this.added = "";
  }
}

class ToolCall {
  /** A call: the function's name, and its arguments as they are written, then as a list. */
  constructor() {
    this.name = "";
    this.written = "";
    this.called = element("code");
    this.values = element("div");
    const caption = element("figcaption", {}, `${translate("toolCall")} `, this.called);
    this.element = element("figure", { class: "call" }, caption, this.values);
  }

  add({ name, arguments: more }) {
    this.name += textOf(name);
    this.written += textOf(more);
    this.changed = true;
  }

  end() {
    this.ended = this.changed = true;
  }

  draw() {
    if (!this.changed) return;
    this.changed = false;
    setText(this.called, this.name);
    const values = this.ended ? objectOf(this.written || "{}") : null;
    this.values.replaceChildren(...(values ? listOf(values) : asWritten(this.written)));
  }
}

/** Return JSON on one line if that is short, else on several. */
function jsonOf(value) {
  const spaced = JSON.stringify(value, null, 1).replace(/\n */g, " "); // line breaks in texts are escaped
  return spaced.length <= ONE_LINE_CHARS ? spaced : JSON.stringify(value, null, 2);
}

/** Return a list of the arguments. Texts are shown as such, all other values as JSON. */
function listOf(values) {
  const terms = Object.entries(values).flatMap(([key, value]) => [
    element("dt", {}, key),
    element("dd", {}, typeof value === "string" ? value : element("code", {}, jsonOf(value))),
  ]);
  return terms.length ? [element("dl", {}, ...terms)] : [];
}

const asWritten = (text) => (text ? [element("pre", { tabindex: "0" }, element("code", {}, text))] : []);

const textOf = (value) => (typeof value === "string" ? value : "");

/** Return the object that a text of JSON is, or null. */
function objectOf(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
