// The pages, one at a time, chosen by the address's fragment; and what a page reads while it is shown.

import { element, setAttribute, setText } from "./element.js";
import { Refusal, server } from "./server.js";
import { hasText, translate, wait } from "./words.js";

/** How often a page is read. With the 0.25 s for which servers collect, it is right within a second. */
export const EVERY_MS = 400;
const FIRST = "now";
const RETRY_MS = 2000;

const nav = document.querySelector("#pages");
const alarm = document.querySelector("#page-problem");
const pages = new Map();
const problems = { action: "", data: "" };
let shown = null;

/**
 * Add a page: its section is `#page-ID`, its name `words`. `start` is called when it is shown, and returns a
 * function that ends what it began; `draw` when the language changes.
 */
export function addPage(id, words, { start = () => () => {}, draw = () => {} } = {}) {
  const link = element("a", { href: `#${id}` });
  nav.append(element("li", {}, link));
  pages.set(id, { id, words, link, start, draw, section: document.querySelector(`#page-${id}`), stop: null });
}

/** Show the page that the address names. Other fragments, such as that of the skip link, change nothing. */
function follow() {
  const wanted = location.hash.slice(1) || FIRST;
  if (pages.has(wanted) && wanted !== shown) show(wanted);
}

function show(id) {
  if (shown) pages.get(shown).stop?.();
  shown = id;
  report("");
  report("", "data");
  for (const page of pages.values()) {
    page.section.hidden = page.id !== id;
    setAttribute(page.link, "aria-current", page.id === id ? "page" : null);
  }
  document.querySelector("main").dataset.page = id;
  const page = pages.get(id);
  page.draw();
  page.stop = page.start();
}

/** Hide a page that a key may not use. */
export function offerPage(id, isOffered) {
  const page = pages.get(id);
  page.link.parentElement.hidden = !isOffered;
  if (!isOffered && shown === id) location.hash = FIRST;
}

/** Begin: all pages are added. */
export function startPages() {
  addEventListener("hashchange", follow);
  redrawPages();
  show(FIRST);
  follow();
}

/** Redraw the names and the shown page, in another language. */
export function redrawPages() {
  for (const page of pages.values()) setText(page.link, translate(page.words));
  if (shown) pages.get(shown).draw();
}

/**
 * Show why an action has failed, until the next action or page; or, `of` "data", why the page's data cannot be
 * had or may be old, until they are read. "": there is no problem any more.
 */
export function report(words, of = "action") {
  problems[of] = words;
  const shownWords = problems.action || problems.data;
  setText(alarm, shownWords);
  alarm.hidden = !shownWords;
}

/** Return the words for an error of a request. */
export function wordsOf(error) {
  if (!(error instanceof Refusal)) return translate("unreachable");
  if (hasText(error.code)) return translate(error.code, { wait: wait(error.retryAfter ?? 2), reason: error.message });
  return error.message || translate("unreachable");
}

/**
 * Read a path now, and again `everyMs` after each answer while the tab is visible. Call `onData` with what it has. An error
 * is shown above the page until the next success. `path` may be a function. Returns a function that ends it;
 * its member `now` reads again at once.
 */
export function poll(path, onData, everyMs = EVERY_MS) {
  let controller = new AbortController();
  let timer = 0;
  let ended = false;
  const read = async () => {
    clearTimeout(timer);
    controller.abort();
    const mine = controller = new AbortController();
    let next = everyMs;
    if (!document.hidden) {
      try {
        const response = await server.call(typeof path === "function" ? path() : path, { signal: mine.signal });
        const data = await response.json();
        if (ended || mine !== controller) return;
        report("", "data");
        onData(data);
      } catch (error) {
        if (ended || mine !== controller) return;
        if (!(error instanceof Refusal || error instanceof TypeError)) reportError(error);
        if (error.status !== 401) report(wordsOf(error), "data"); // for a key the dialog asks
        next = Math.max(everyMs, RETRY_MS);
      }
    }
    if (mine === controller && !ended) timer = setTimeout(read, next);
  };
  const wake = () => { if (!document.hidden) read(); };
  document.addEventListener("visibilitychange", wake);
  server.addEventListener("key", read);
  read();
  const stop = () => {
    ended = true;
    clearTimeout(timer);
    controller.abort();
    document.removeEventListener("visibilitychange", wake);
    server.removeEventListener("key", read);
  };
  return Object.assign(stop, { now: read });
}
