// The chat: one question at a time, its position in the queue, and the streamed answer. Stopping an answer
// disconnects, which frees its place in the queue or its seat at once. Chats are kept in the browser.

import { AnswerParts } from "./answer.js";
import { chats, forget, keep, keepSettings, settings, useOwner } from "./chats.js";
import { copyButton } from "./copy.js";
import { element, setText } from "./element.js";
import { askForKey } from "./key.js";
import { elementsOf } from "./markdown.js";
import { knowModels, textModels } from "./models.js";
import { Refusal, server } from "./server.js";
import { eventsOf } from "./sse.js";
import { count, hasText, percent, translate, time, wait } from "./words.js";

const QUEUED = /^queued position=(\d+)(?: estimated_wait=(\d+))?$/;
const ANNOUNCEMENT_INTERVAL_MS = 10_000;
const ANNOUNCED_CHARS = 1500; // of a finished answer, for screen readers
const NEAR_END_PX = 48;
const TITLE_CHARS = 60;

const form = document.querySelector("#chat-form");
const question = document.querySelector("#question");
const button = document.querySelector("#chat-button");
const picker = document.querySelector("#chat-model");
const transcript = document.querySelector("#transcript");
const status = document.querySelector("#chat-status");
const alarm = document.querySelector("#chat-problem");
const earlier = document.querySelector("#chat-history");
const forgetButton = document.querySelector("#chat-forget");
const options = document.querySelector("#chat-settings");

let messages = [];
let chatId = newId();
let current = null;

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
}

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
    this.line = element("li", { class: "turn running" }, element("h3", {}, model), this.parts.body, this.note, actionsOf(this));
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
    showProblem(problem ? words : "");
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
    return finish === "limit" ? `${words}. ${translate("cutOff")}` : words;
  }
}

// What can be done with a message ---------------------------------------------------------------------

/** Return the buttons below an answer: copy its text, or have it written again. */
function actionsOf(turn) {
  const again = element("button", { type: "button", class: "quiet small", "data-action": "again" }, translate("regenerate"));
  again.addEventListener("click", () => regenerate(turn.line));
  const copy = copyButton(() => turn.text);
  copy.dataset.action = "copy";
  return element("p", { class: "actions" }, copy, again);
}

/** Return the line of a question, which can be changed and copied. */
function questionLine(text) {
  const edit = element("button", { type: "button", class: "quiet small", "data-action": "edit" }, translate("edit"));
  const line = element(
    "li", { class: "turn mine" }, element("h3", {}, translate("you")), element("div", { class: "text" }, text),
    element("p", { class: "actions" }, copyButton(() => text), edit),
  );
  edit.addEventListener("click", () => editQuestion(line, text));
  return line;
}

/** Return how many messages come before a line of the transcript. A failed question has none. */
const messagesBefore = (line) => [...transcript.children].slice(0, [...transcript.children].indexOf(line))
  .filter((each) => each.dataset.kept === "true").length;

/** Remove a line and all after it, and their messages. */
function cutAt(line) {
  stop();
  current = null;
  messages = messages.slice(0, messagesBefore(line));
  while (line.nextSibling) line.nextSibling.remove();
  line.remove();
}

/** Have an answer written again, and forget what came after it. */
function regenerate(line) {
  const asked = line.previousSibling;
  const text = asked.querySelector(".text").textContent;
  cutAt(asked);
  ask(text);
}

/** Put a question into the input to be changed. It and all after it are forgotten when that is sent. */
function editQuestion(line, text) {
  cutAt(line);
  welcome();
  labelButton();
  question.value = text;
  question.focus();
}

/** Show an error near the input, wherever the transcript is scrolled to. */
function showProblem(words) {
  setText(alarm, words);
  alarm.hidden = !words;
}

// Asking ----------------------------------------------------------------------------------------------

/** Return the fields of a request that the settings add. */
function chosenOptions() {
  const { temperature, limit } = settings();
  const fields = {};
  if (temperature !== "") fields.temperature = Number(temperature);
  if (limit !== "") fields.max_tokens = Number(limit);
  return fields;
}

async function ask(text) {
  const model = picker.value;
  showProblem("");
  const turn = new Turn(model);
  const controller = new AbortController();
  const mine = { turn, controller };
  current = mine;
  const asked = messages; // a new chat has other messages; an answer in progress belongs to the old ones
  asked.push({ role: "user", content: text });
  transcript.querySelector(".welcome")?.remove();
  const line = questionLine(text);
  transcript.append(line, turn.line);
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
    if (turn.text) {
      asked.push({ role: "assistant", content: turn.text });
      line.dataset.kept = turn.line.dataset.kept = "true";
      if (asked === messages) keepChat(model);
    } else if (asked.at(-1)?.role === "user") asked.pop();
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
    json: { model, messages: [...systemMessage(), ...asked], stream: true, stream_options: { include_usage: true }, ...chosenOptions() },
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

function systemMessage() {
  const content = settings().system.trim();
  return content ? [{ role: "system", content }] : [];
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
  if (messages.length || current) return;
  transcript.replaceChildren(element("li", { class: "welcome" }, element("p", {}, translate("welcome")), element("p", {}, translate("keys"))));
}

// Chats of this browser --------------------------------------------------------------------------------

/** Keep the chat in the browser. */
function keepChat(model) {
  keep({ id: chatId, title: messages[0].content.slice(0, TITLE_CHARS), model, messages });
  offerChats();
}

/** Offer the kept chats. */
function offerChats() {
  const kept = chats();
  const offered = [["", translate("history")], ...kept.map(({ id, title }) => [id, title])];
  earlier.replaceChildren(...offered.map(([value, words]) => element("option", { value }, words)));
  earlier.value = kept.some(({ id }) => id === chatId) ? chatId : "";
  earlier.parentElement.hidden = !kept.length;
  forgetButton.hidden = !earlier.value;
}

/** Show a kept chat, which goes on. */
function openChat(id) {
  const chat = chats().find((each) => each.id === id);
  if (!chat) return;
  begin();
  chatId = id;
  messages = chat.messages.filter(({ role, content }) => ["user", "assistant"].includes(role) && typeof content === "string");
  if ([...picker.options].some(({ value }) => value === chat.model)) picker.value = chat.model;
  transcript.replaceChildren(...messages.map(({ role, content }) => (role === "user" ? keptQuestion(content) : keptAnswer(chat.model, content))));
  transcript.scrollTop = transcript.scrollHeight;
  offerChats();
}

function keptQuestion(text) {
  const line = questionLine(text);
  line.dataset.kept = "true";
  return line;
}

function keptAnswer(model, text) {
  const body = element("div", { class: "parts" }, element("div", { class: "text" }, ...elementsOf(text)));
  const line = element("li", { class: "turn", "data-kept": "true" }, element("h3", {}, model), body);
  line.append(actionsOf({ line, text }));
  return line;
}

/** Begin a new chat. */
function begin() {
  stop();
  current = null;
  messages = [];
  chatId = newId();
  showProblem("");
  transcript.replaceChildren();
  welcome();
  labelButton();
  offerChats();
}

/** Use the chats of the key in use, named by its id. */
export function useChatsOf(id) {
  useOwner(id);
  begin();
}

earlier.addEventListener("change", () => (earlier.value ? openChat(earlier.value) : begin()));
forgetButton.addEventListener("click", () => {
  forget(chatId);
  begin();
  question.focus();
});

// Settings ---------------------------------------------------------------------------------------------

for (const [name, value] of Object.entries(settings())) options.elements[name].value = value;
options.addEventListener("input", () => {
  if (!options.checkValidity()) return;
  keepSettings(Object.fromEntries(["system", "temperature", "limit"].map((name) => [name, options.elements[name].value])));
});
options.addEventListener("submit", (event) => event.preventDefault());

// Models -----------------------------------------------------------------------------------------------

/** Handle a snapshot: offer its models, and show the load progress of the one that the chat waits for. */
export function showModels({ models }) {
  knowModels(models, offer);
  offer();
  const wanted = current && models.find(({ model }) => model === current.turn.model);
  if (wanted?.state === "loading") current.turn.awaitModel(wanted.load.progress);
}

/** Offer the models that make text, and keep the selected one. */
function offer() {
  const names = textModels();
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
  offerChats();
  for (const button of transcript.querySelectorAll("[data-action]")) setText(button, translate({ again: "regenerate", copy: "copy", edit: "edit" }[button.dataset.action]));
}

/** The model that is chosen; "": there is none yet. */
export const chosenModel = () => picker.value;

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (current) stop();
  else if (text && !picker.value) showProblem(translate("noModel"));
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
  begin();
  question.focus();
});
