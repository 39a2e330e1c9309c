// The chat: one question at a time, its position in the queue, and the streamed answer. Stopping an answer
// disconnects, which frees its place in the queue or its seat at once.

import { AnswerParts } from "./answer.js";
import { element, setText } from "./element.js";
import { askForKey } from "./key.js";
import { Refusal, server } from "./server.js";
import { eventsOf } from "./sse.js";
import { count, hasText, percent, translate, time, wait } from "./words.js";

const QUEUED = /^queued position=(\d+)(?: estimated_wait=(\d+))?$/;
const ANNOUNCEMENT_INTERVAL_MS = 10_000;
const ANNOUNCED_CHARS = 1500; // of a finished answer, for screen readers
const NEAR_END_PX = 48;

const form = document.querySelector("#chat-form");
const question = document.querySelector("#question");
const button = document.querySelector("#chat-button");
const picker = document.querySelector("#chat-model");
const transcript = document.querySelector("#transcript");
const status = document.querySelector("#chat-status");

let messages = [];
let current = null;

// One answer ------------------------------------------------------------------------------------------

class Turn {
  /** The line of an answer in the transcript: its parts so far, and its state. */
  constructor(model) {
    this.model = model;
    this.parts = new AnswerParts();
    this.hasRole = false;
    this.begun = false; // the response has begun
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.note = element("p", { class: "note" });
    this.line = element("li", { class: "turn running" }, element("h3", {}, model), this.parts.body, this.note);
    this.announced = -Infinity;
    this.place = null;
    setText(this.note, translate("sending"));
  }

  /** Show the state, and announce it to screen readers if `place` has changed, but not too often. */
  showState(words, place) {
    setText(this.note, words);
    const soon = performance.now() - this.announced < ANNOUNCEMENT_INTERVAL_MS;
    if (place === this.place || (soon && place > 0)) return;
    this.place = place;
    this.announced = performance.now();
    status.textContent = words;
  }

  /** Show the queue position, and count down between the server's reports. */
  queue(position, seconds) {
    clearInterval(this.clock);
    if (seconds === null) {  // no server has the model
      this.showState(translate("queuedOnly", { position: count(position) }), position);
      return;
    }
    const until = performance.now() + 1000 * seconds;
    const show = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      if (left < 0) this.showState(translate("overdue"), -2);
      else this.showState(translate("queued", { position: count(position), wait: wait(Math.max(1, left)) }), position);
    };
    show();
    this.clock = setInterval(show, 1000);
  }

  /** Show that the model is being loaded; `progress` is 0…1, or null if unknown. */
  awaitModel(progress) {
    if (this.first !== null) return;
    this.leaveQueue();
    const [key, values] = progress === null ? ["awaitingLoad", {}] : ["awaiting", { n: percent(progress) }];
    this.showState(translate(key, { name: this.model, ...values }), -1);
  }

  leaveQueue() {
    clearInterval(this.clock);
  }

  get text() {
    return this.parts.text;
  }

  /** Add a delta. Reasoning before the role is not the model's: with it, servers report that they load it. */
  add(delta) {
    this.hasRole ||= Boolean(delta.role);
    if (!this.parts.add(delta)) return;
    if (this.first === null && (this.hasRole || !this.parts.isThinking)) {
      this.first = performance.now();
      this.leaveQueue();
      setText(this.note, translate("answering"));
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = undefined;
    this.note.hidden = this.first !== null && this.parts.isThinking; // the reasoning shows the state
    following(() => this.parts.draw());
  }

  /** End the turn: draw the answer, then show the outcome and announce it. */
  end(words, { problem = false } = {}) {
    this.leaveQueue();
    cancelAnimationFrame(this.frame);
    this.parts.end();
    this.draw();
    this.note.hidden = false;
    this.line.classList.remove("running");
    this.note.classList.toggle("problem", problem);
    setText(this.note, words);
    const spoken = problem ? "" : this.parts.spoken.slice(0, ANNOUNCED_CHARS);
    status.textContent = spoken ? `${spoken}\n${words}` : words;
  }

  summary(finish) {
    const now = performance.now();
    if (this.parts.isEmpty) return translate("empty");
    const tokens = this.usage?.completion_tokens;
    if (tokens === undefined || this.first === null) return "";
    const words = translate("done", {
      tokens: count(tokens),
      time: time((now - this.began) / 1000),
      first: time((this.first - this.began) / 1000),
    });
    return finish === "length" ? `${words}. ${translate("cutOff")}` : words;
  }
}

// Asking ----------------------------------------------------------------------------------------------

async function ask(text) {
  const model = picker.value;
  const turn = new Turn(model);
  const controller = new AbortController();
  const mine = { turn, controller };
  current = mine;
  const asked = messages; // a new chat has other messages; an answer in progress belongs to the old ones
  asked.push({ role: "user", content: text });
  transcript.querySelector(".welcome")?.remove();
  transcript.append(
    element("li", { class: "turn mine" }, element("h3", {}, translate("you")), element("div", { class: "text" }, text)),
    turn.line,
  );
  transcript.scrollTop = transcript.scrollHeight;
  labelButton();
  try {
    const finish = await answer(model, asked, turn, controller.signal);
    turn.end(turn.summary(finish));
  } catch (error) {
    turn.end(...explain(error, turn));
    if (error instanceof Refusal && error.status === 401) askForKey();
    if (!turn.text && !question.value && asked === messages) question.value = text; // to be sent again
  } finally {
    controller.abort();
    if (turn.text) asked.push({ role: "assistant", content: turn.text });
    else asked.pop();
    if (current === mine) current = null;
    labelButton();
  }
}

/** Stream the answer into the turn; return its finish reason. Throws if the answer is incomplete. */
async function answer(model, asked, turn, signal) {
  // Until the server reports on this request, show its estimate for a new one.
  const path = `queue/estimate?model=${encodeURIComponent(model)}`;
  const estimate = await server.call(path, { signal }).then((response) => response.json()).catch(() => null);
  signal.throwIfAborted();
  if (estimate?.position > 0) turn.queue(estimate.position, estimate.estimated_wait_s);
  const response = await server.call("v1/chat/completions", {
    method: "POST",
    json: { model, messages: asked, stream: true, stream_options: { include_usage: true } },
    signal,
  });
  turn.begun = true;
  let finish = null;
  for await (const { comment, data } of eventsOf(response)) {
    if (comment !== undefined) {
      const place = QUEUED.exec(comment);
      if (place) turn.queue(Number(place[1]), place[2] === undefined ? null : Number(place[2]));
      else if (turn.first === null) {
        turn.leaveQueue();
        turn.showState(translate("begun"), 0);
      }
      continue;
    }
    if (data === "[DONE]") return finish ?? "stop";
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(0, chunk.error);
    turn.usage = chunk.usage ?? turn.usage;
    const choice = chunk.choices?.[0];
    turn.add(choice?.delta ?? {});
    finish = choice?.finish_reason ?? finish;
  }
  throw new Refusal(0, { message: translate("broken") });
}

/** Return the words for an answer that is incomplete. */
function explain(error, turn) {
  if (error.name === "AbortError") return [translate("halted")];
  if (!(error instanceof Refusal || error instanceof TypeError)) reportError(error); // a bug of this page
  if (!(error instanceof Refusal)) return [translate(turn.begun ? "broken" : "unreachable"), { problem: true }];
  const code = error.code === "draining" ? "draining_server" : error.code;
  const words = hasText(code) ? translate(code, { wait: wait(error.retryAfter ?? 2), reason: error.message }) : error.message;
  return [words || translate("broken"), { problem: true }];
}

const stop = () => current?.controller.abort();

// The page --------------------------------------------------------------------------------------------

/** Change the transcript, and keep it scrolled to its end if it was. */
function following(change) {
  const atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_END_PX;
  change();
  if (atEnd) transcript.scrollTop = transcript.scrollHeight;
}

/** Label the button with its current action. */
function labelButton() {
  setText(button, translate(current ? "stop" : "send"));
  button.classList.toggle("stops", current !== null);
}

function welcome() {
  if (messages.length) return;
  transcript.replaceChildren(element("li", { class: "welcome" }, element("p", {}, translate("welcome")), element("p", {}, translate("keys"))));
}

/** Handle a snapshot: offer its models, and show the load progress of the one that the chat waits for. */
export function showModels({ models }) {
  offer(models);
  const wanted = current && models.find(({ model }) => model === current.turn.model);
  if (wanted?.state === "loading") current.turn.awaitModel(wanted.load.progress);
}

/** Offer these models, and keep the selected one. */
function offer(models) {
  const names = models.filter(({ unlisted }) => !unlisted).map(({ model }) => model);
  const offered = [...picker.options].map(({ value }) => value);
  if (names.join("\n") === offered.join("\n")) return;
  const picked = picker.value;
  picker.replaceChildren(...names.map((each) => element("option", { value: each }, each)));
  if (names.includes(picked)) picker.value = picked;
}

/** Redraw everything, in another language. The messages stay as they are. */
export function redrawChat() {
  labelButton();
  welcome();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (current) stop();
  else if (text && !picker.value) status.textContent = translate("noModel");
  else if (text) {
    question.value = "";
    ask(text);
  }
  question.focus();
});

question.addEventListener("keydown", (event) => {
  // While characters are being composed (Japanese, Chinese), Enter ends the composition. 229 is for Safari.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (!current) form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && current && !event.isComposing && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    stop();
  }
});

document.querySelector("#chat-new").addEventListener("click", () => {
  stop();
  current = null;
  messages = [];
  transcript.replaceChildren();
  welcome();
  question.focus();
});
