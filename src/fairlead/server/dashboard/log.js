// The log of a model's processes, as it grows, in a dialog. Its text is shown as it is.

import { setText } from "./element.js";
import { wordsOf } from "./router.js";
import { server } from "./server.js";
import { translate } from "./words.js";

const MOST_CHARS = 200_000;
const NEAR_END_PX = 24;

const dialog = document.querySelector("#log-dialog");
const heading = document.querySelector("#log-heading");
const shown = document.querySelector("#log");
const problem = document.querySelector("#log-problem");
const hint = document.querySelector("#log-hint");
let reading = new AbortController();

/** Show the log of a model. */
export async function openLog(name) {
  reading.abort();
  const mine = reading = new AbortController();
  setText(heading, translate("logOf", { name }));
  setText(problem, "");
  setText(hint, translate("logEmpty"));
  setText(shown, "");
  if (!dialog.open) dialog.showModal();
  try {
    const response = await server.call(`models/${encodeURIComponent(name)}/logs?follow=true`, { signal: mine.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      add(value);
    }
  } catch (error) {
    if (!mine.signal.aborted) setText(problem, wordsOf(error));
  }
}

function add(text) {
  if (text) setText(hint, "");
  const atEnd = shown.scrollHeight - shown.scrollTop - shown.clientHeight < NEAR_END_PX;
  shown.append(text);
  if (shown.textContent.length > MOST_CHARS) setText(shown, shown.textContent.slice(-MOST_CHARS / 2));
  if (atEnd) shown.scrollTop = shown.scrollHeight;
}

document.querySelector("#log-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => reading.abort());
