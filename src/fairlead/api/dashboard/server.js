// The server: how it is called, with which key, and the stream of what it does. Knows nothing of the page.

import { eventsOf } from "./sse.js";

const STORED = "fairlead-key";
const AGAIN_AFTER_MS = [500, 1000, 2000, 4000];
const SILENT_MS = 8000; // it speaks every second

/** An answer that is not the wanted one: `status`, and what the server says of it. */
export class Refusal extends Error {
  constructor(status, { message = "", code = "" } = {}, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

function keyOfThisTab() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch { // storage can be forbidden; then a key lives as long as the page
    return "";
  }
}

/** A header's value is bytes, written as characters; a key may have others. */
const bytesOf = (text) => String.fromCharCode(...new TextEncoder().encode(text));

export const server = Object.assign(new EventTarget(), {
  key: keyOfThisTab(),

  /** Use another key, or none, from now on. It is kept as long as the tab. */
  useKey(key) {
    server.key = key;
    try {
      if (key) sessionStorage.setItem(STORED, key);
      else sessionStorage.removeItem(STORED);
    } catch { /* as above */ }
    server.dispatchEvent(new Event("key"));
  },

  /** Call a path with JSON or nothing; return the response. Raises `Refusal`, or `TypeError` when nobody answers. */
  async call(path, { method = "GET", json, signal } = {}) {
    const headers = {};
    if (server.key) headers.Authorization = `Bearer ${bytesOf(server.key)}`;
    if (json !== undefined) headers["Content-Type"] = "application/json";
    const body = json === undefined ? undefined : JSON.stringify(json);
    const response = await fetch(path, { method, headers, body, signal, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    const answer = await response.json().catch(() => ({}));
    throw new Refusal(response.status, answer?.error ?? {}, Number(response.headers.get("Retry-After")) || null);
  },

  /**
   * Follow `GET /events` for ever, connecting again whenever it ends. Calls `on[event](value)` for each
   * event, and `onState` with "connecting", "live", "lost" or "key" (then it waits for another key).
   */
  async follow(on, onState) {
    let failures = 0;
    for (;;) {
      const attempt = new AbortController();
      const hangUp = () => attempt.abort();
      let silence = 0;
      server.addEventListener("key", hangUp, { once: true });
      try {
        silence = setTimeout(hangUp, SILENT_MS);
        const response = await server.call("events", { signal: attempt.signal });
        for await (const { event, data } of eventsOf(response)) {
          clearTimeout(silence);
          silence = setTimeout(hangUp, SILENT_MS);
          if (!(event in on)) continue;
          failures = 0;
          onState("live");
          try {
            on[event](JSON.parse(data));
          } catch (error) {
            reportError(error); // a mistake of ours is no reason to call again
          }
        }
      } catch (error) {
        if (error.status === 401) {
          onState("key");
          await new Promise((resolve) => { server.addEventListener("key", resolve, { once: true }); });
          onState("connecting");
          continue;
        }
        if (!(error instanceof TypeError || error instanceof Refusal || error.name === "AbortError")) throw error;
      } finally {
        clearTimeout(silence);
        server.removeEventListener("key", hangUp);
        attempt.abort();
      }
      onState("lost");
      const pause = AGAIN_AFTER_MS[Math.min(failures, AGAIN_AFTER_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => { setTimeout(resolve, pause * (0.75 + Math.random() / 2)); });
    }
  },
});
