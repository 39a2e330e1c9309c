// The chat: one question at a time, its position in the queue, and the streamed answer. Stopping disconnects,
// which frees the place in the queue or the seat at once.

import { element, put } from "./element.js";
import { askForKey } from "./key.js";
import { elementsOf } from "./markdown.js";
import { Refusal, server } from "./server.js";
import { eventsOf } from "./sse.js";
import { count, knows, percent, say, time, wait } from "./words.js";

const QUEUED = /^queued position=(\d+) estimated_wait=(\d+)$/;
const ANNOUNCED_APART_MS = 10_000;
const READ_OUT = 1500; // characters of a finished answer that are read out
const NEAR_END = 48;

const form = document.querySelector("#chat-form");
const question = document.querySelector("#question");
const button = document.querySelector("#chat-button");
const picker = document.querySelector("#chat-model");
const transcript = document.querySelector("#transcript");
const status = document.querySelector("#chat-status");

let messages = [];
let underWay = null;

// One answer ------------------------------------------------------------------------------------------

class Turn {
  /** The line of an answer in the transcript: its text so far, and its state. */
  constructor(model) {
    this.model = model;
    this.text = "";
    this.begun = false; // the response has begun
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.body = element("div", { class: "text" });
    this.note = element("p", { class: "note" });
    this.line = element("li", { class: "turn under-way" }, element("h3", {}, model), this.body, this.note);
    this.announced = -Infinity;
    this.place = null;
    put(this.note, say("sending"));
  }

  /** Show the state; read it out if `place` has changed, but not queue positions in quick succession. */
  stand(words, place) {
    put(this.note, words);
    const soon = performance.now() - this.announced < ANNOUNCED_APART_MS;
    if (place === this.place || (soon && place > 0)) return;
    this.place = place;
    this.announced = performance.now();
    status.textContent = words;
  }

  /** Show the queue position, and count down between the server's reports. */
  queue(position, seconds) {
    clearInterval(this.clock);
    const until = performance.now() + 1000 * seconds;
    const show = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      if (left < 0) this.stand(say("overdue"), -2);
      else this.stand(say("queued", { position: count(position), wait: wait(Math.max(1, left)) }), position);
    };
    show();
    this.clock = setInterval(show, 1000);
  }

  /** Show that the model is being loaded; `progress` is 0…1, or null if unknown. */
  awaitModel(progress) {
    if (this.first !== null) return;
    this.leaveQueue();
    const far = progress === null ? ["awaitingLoad", {}] : ["awaiting", { n: percent(progress) }];
    this.stand(say(far[0], { name: this.model, ...far[1] }), -1);
  }

  leaveQueue() {
    clearInterval(this.clock);
  }

  add(text) {
    if (!text) return;
    if (this.first === null) {
      this.first = performance.now();
      this.leaveQueue();
      put(this.note, say("answering"));
    }
    this.text += text;
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = undefined;
    following(() => this.body.replaceChildren(...elementsOf(this.text)));
  }

  /** End the turn: draw the answer, then show the outcome and read it out. */
  end(words, { problem = false } = {}) {
    this.leaveQueue();
    cancelAnimationFrame(this.frame);
    this.draw();
    this.line.classList.remove("under-way");
    this.note.classList.toggle("problem", problem);
    put(this.note, words);
    status.textContent = problem || !this.text ? words : `${this.text.slice(0, READ_OUT)}\n${words}`;
  }

  summary(finish) {
    const now = performance.now();
    if (!this.text) return say("empty");
    const tokens = this.usage?.completion_tokens;
    if (tokens === undefined || this.first === null) return "";
    const words = say("done", {
      tokens: count(tokens),
      time: time((now - this.began) / 1000),
      first: time((this.first - this.began) / 1000),
    });
    return finish === "length" ? `${words}. ${say("cutOff")}` : words;
  }
}

// Asking ----------------------------------------------------------------------------------------------

async function ask(text) {
  const model = picker.value;
  const turn = new Turn(model);
  const hangUp = new AbortController();
  const mine = { turn, hangUp };
  underWay = mine;
  const asked = messages; // a new chat has other messages; an answer in progress belongs to the old ones
  asked.push({ role: "user", content: text });
  transcript.querySelector(".welcome")?.remove();
  transcript.append(
    element("li", { class: "turn mine" }, element("h3", {}, say("you")), element("div", { class: "text" }, text)),
    turn.line,
  );
  transcript.scrollTop = transcript.scrollHeight;
  name();
  try {
    const finish = await answer(model, asked, turn, hangUp.signal);
    turn.end(turn.summary(finish));
  } catch (error) {
    turn.end(...explain(error, turn));
    if (error instanceof Refusal && error.status === 401) askForKey();
    if (!turn.text && !question.value && asked === messages) question.value = text; // to be sent again
  } finally {
    hangUp.abort();
    if (turn.text) asked.push({ role: "assistant", content: turn.text });
    else asked.pop();
    if (underWay === mine) underWay = null;
    name();
  }
}

/** Stream the answer into the turn; return its finish reason. Throws if the answer is incomplete. */
async function answer(model, asked, turn, signal) {
  // Until the server reports on this request, show its estimate for a new one.
  const path = `queue/estimate?model=${encodeURIComponent(model)}`;
  const told = await server.call(path, { signal }).then((response) => response.json()).catch(() => null);
  signal.throwIfAborted();
  if (told?.position > 0) turn.queue(told.position, told.estimated_wait_s);
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
      if (place) turn.queue(Number(place[1]), Number(place[2]));
      else if (turn.first === null) {
        turn.leaveQueue();
        turn.stand(say("begun"), 0);
      }
      continue;
    }
    if (data === "[DONE]") return finish ?? "stop";
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(0, chunk.error);
    turn.usage = chunk.usage ?? turn.usage;
    const choice = chunk.choices?.[0];
    turn.add(choice?.delta?.content ?? "");
    finish = choice?.finish_reason ?? finish;
  }
  throw new Refusal(0, { message: say("broken") });
}

/** Return the words for an answer that is incomplete. */
function explain(error, turn) {
  if (error.name === "AbortError") return [say("halted")];
  if (!(error instanceof Refusal || error instanceof TypeError)) reportError(error); // our own bug
  if (!(error instanceof Refusal)) return [say(turn.begun ? "broken" : "unreachable"), { problem: true }];
  const code = error.code === "draining" ? "draining_server" : error.code;
  const words = knows(code) ? say(code, { wait: wait(error.retryAfter ?? 2), reason: error.message }) : error.message;
  return [words || say("broken"), { problem: true }];
}

const stop = () => underWay?.hangUp.abort();

// The page --------------------------------------------------------------------------------------------

/** Change the transcript, and keep it scrolled to its end if it was. */
function following(change) {
  const atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_END;
  change();
  if (atEnd) transcript.scrollTop = transcript.scrollHeight;
}

/** Label the button with what it does now. */
function name() {
  put(button, say(underWay ? "stop" : "send"));
  button.classList.toggle("stops", underWay !== null);
}

function welcome() {
  if (messages.length) return;
  transcript.replaceChildren(element("li", { class: "welcome" }, element("p", {}, say("welcome")), element("p", {}, say("keys"))));
}

/** Handle a snapshot: offer its models, and show the load progress of the one that the chat waits for. */
export function showModels({ models }) {
  offer(models);
  const wanted = underWay && models.find(({ model }) => model === underWay.turn.model);
  if (wanted?.state === "loading") underWay.turn.awaitModel(wanted.load.progress);
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
export function sayChatAgain() {
  name();
  welcome();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (underWay) stop();
  else if (text && !picker.value) status.textContent = say("noModel");
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
  if (!underWay) form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && underWay && !event.isComposing && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    stop();
  }
});

document.querySelector("#chat-new").addEventListener("click", () => {
  stop();
  underWay = null;
  messages = [];
  transcript.replaceChildren();
  welcome();
  question.focus();
});
