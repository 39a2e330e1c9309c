// Server-sent events from a `fetch`. An EventSource cannot send an API key, shows no comments and hides the status.

/**
 * Yield the events of a response body as they arrive: `{event, data}`, or `{comment}`.
 * An event that the body's end cuts off is dropped, as the standard requires.
 */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    let event = "";
    let data = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const ended of lines) {
        const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
        } else if (line.startsWith(":")) {
          yield { comment: line.slice(1).trim() };
        } else {
          const colon = line.indexOf(":");
          const field = colon < 0 ? line : line.slice(0, colon);
          const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
          if (field === "data") data.push(text);
          else if (field === "event") event = text;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // disconnect when the reader stops
  }
}
