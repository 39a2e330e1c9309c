// The subset of Markdown that models write, as elements. Anything else is shown as plain text. There are no
// links, no images and no HTML, so an answer can neither load from other servers nor change the page.

import { element } from "./element.js";

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^#{1,6}\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d{1,9}[.)]\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:.*?\S)?)\*/g;

/** Return the elements for a text, which may still be growing. */
export function elementsOf(text) {
  const lines = text.split("\n");
  const elements = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
    } else if (FENCE.test(lines[at])) {
      const fence = FENCE.exec(lines[at])[1];
      const end = lines.findIndex((line, i) => i > at && line.trim().startsWith(fence));
      const code = lines.slice(at + 1, end < 0 ? undefined : end).join("\n");
      elements.push(element("pre", { tabindex: "0" }, element("code", {}, code)));
      at = end < 0 ? lines.length : end + 1;
    } else if (HEADING.test(lines[at])) {
      elements.push(element("h4", {}, ...inline(HEADING.exec(lines[at])[1])));
      at += 1;
    } else if (BULLET.test(lines[at]) || NUMBER.test(lines[at])) {
      at = list(lines, at, elements);
    } else {
      const from = at;
      while (at < lines.length && lines[at].trim() && (at === from || !begins(lines[at]))) at += 1;
      elements.push(element("p", {}, ...inline(lines.slice(from, at).join("\n"))));
    }
  }
  return elements;
}

const begins = (line) => [FENCE, HEADING, BULLET, NUMBER].some((beginning) => beginning.test(line));

function list(lines, from, elements) {
  const item = BULLET.test(lines[from]) ? BULLET : NUMBER;
  const first = item === NUMBER ? Number.parseInt(lines[from], 10) : 1;
  const made = element(item === BULLET ? "ul" : "ol", first === 1 ? {} : { start: first });
  let at = from;
  while (at < lines.length && item.test(lines[at])) {
    made.append(element("li", {}, ...inline(item.exec(lines[at])[1])));
    at += 1;
  }
  elements.push(made);
  return at;
}

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(at, found.index));
    const [whole, , code, strong, emphasis] = found;
    if (code) parts.push(element("code", {}, code));
    else if (strong) parts.push(element("strong", {}, strong));
    else parts.push(element("em", {}, emphasis));
    at = found.index + whole.length;
  }
  parts.push(text.slice(at));
  return parts.filter((part) => part !== "");
}
