// Requests to the server, the API key, and the stream of events. Independent of the page's elements.

import { eventsOf } from "./sse.js";

const STORAGE_NAME = "fairlead-key";
const RETRY_DELAYS_MS = [500, 1000, 2000, 4000];
const SILENCE_TIMEOUT_MS = 8000; // it sends an event every second

/** An error response: its `status`, and the server's description. */
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
    return sessionStorage.getItem(STORAGE_NAME) ?? "";
  } catch { // storage can be disabled; then a key is kept as long as the page
    return "";
  }
}

/** Return a text's UTF-8 bytes as characters, which a header value needs; a key may have others. */
const bytesOf = (text) => String.fromCharCode(...new TextEncoder().encode(text));

export const server = Object.assign(new EventTarget(), {
  key: keyOfThisTab(),

  /** Use another key, or none, from now on. It is kept until the tab is closed. */
  useKey(key) {
    server.key = key;
    try {
      if (key) sessionStorage.setItem(STORAGE_NAME, key);
      else sessionStorage.removeItem(STORAGE_NAME);
    } catch { /* as above */ }
    server.dispatchEvent(new Event("key"));
  },

  /** Call a path, with JSON or no body. Throws `Refusal`, or `TypeError` if the server is unreachable. */
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
   * Follow `GET /events` forever, and reconnect whenever it ends. Call `on[event](value)` for each
   * event, `onState` with "connecting", "live", "lost" or "key" (then wait for another key), and `onRole`
   * with the role and the id of the key in use.
   */
  async follow(on, onState, onRole) {
    let failures = 0;
    for (;;) {
      const attempt = new AbortController();
      const abort = () => attempt.abort();
      let silence = 0;
      server.addEventListener("key", abort, { once: true });
      try {
        silence = setTimeout(abort, SILENCE_TIMEOUT_MS);
        const response = await server.call("events", { signal: attempt.signal });
        onRole(response.headers.get("X-Fairlead-Role"), response.headers.get("X-Fairlead-Key") ?? "");
        for await (const { event, data } of eventsOf(response)) {
          clearTimeout(silence);
          silence = setTimeout(abort, SILENCE_TIMEOUT_MS);
          if (!(event in on)) continue;
          failures = 0;
          onState("live");
          try {
            on[event](JSON.parse(data));
          } catch (error) {
            reportError(error); // a bug of this page, so reconnecting would not help
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
        server.removeEventListener("key", abort);
        attempt.abort();
      }
      onState("lost");
      const pause = RETRY_DELAYS_MS[Math.min(failures, RETRY_DELAYS_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => { setTimeout(resolve, pause * (0.75 + Math.random() / 2)); });
    }
  },
});
