// The subset of Markdown that models write, as elements. Anything else is shown as plain text. There are no
// images and no HTML, so an answer can neither load from other servers nor change the page. A link leads to
// another server only when it is followed, without telling it from where, and shows where it leads.

import { element } from "./element.js";
import { formula } from "./math.js";

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^#{1,6}\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d{1,9}[.)]\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const BLOCK_FORMULA = /^\s*(\$\$|\\\[)/;
const INLINE = new RegExp([
  /(?<ticks>`+)(?<code>.+?)\k<ticks>/,
  /\\\((?<round>.+?)\\\)/,
  /\$\$(?<double>.+?)\$\$/,
  /(?<![\w$\\])\$(?<single>[^\s$](?:[^$\n]*?[^\s$\\])?)\$(?![\w$])/,
  /\[(?<label>[^\][\n]+)\]\((?<target>[^\s()]+)\)/,
  /(?<bare>https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*])/,
  /\*\*(?<strong>\S(?:.*?\S)?)\*\*/,
  /\*(?<emphasis>\S(?:.*?\S)?)\*/,
].map(({ source }) => source).join("|"), "g");
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MAX_NESTING = 4;

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
    } else if (BLOCK_FORMULA.test(lines[at])) {
      at = blockFormula(lines, at, elements);
    } else if (isTable(lines, at)) {
      at = table(lines, at, elements);
    } else if (HEADING.test(lines[at])) {
      elements.push(element("h4", {}, ...inline(HEADING.exec(lines[at])[1])));
      at += 1;
    } else if (BULLET.test(lines[at]) || NUMBER.test(lines[at])) {
      at = list(lines, at, elements);
    } else {
      const from = at;
      while (at < lines.length && lines[at].trim() && (at === from || !(begins(lines[at]) || isTable(lines, at)))) at += 1;
      elements.push(element("p", {}, ...inline(lines.slice(from, at).join("\n"))));
    }
  }
  return elements;
}

const begins = (line) => [FENCE, BLOCK_FORMULA, HEADING, BULLET, NUMBER].some((beginning) => beginning.test(line));

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

/** A table begins with a line of cells, under which a line divides the columns. */
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);

/** Return the cells of a line. A bar after a backslash, or in code, is no border. */
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").match(/(?:\\\||`[^`]*`|[^|])*(?:\||$)/g) ?? [];
  if (cells.at(-1) === "") cells.pop();
  return cells.map((cell) => cell.replace(/\|$/, "").replaceAll("\\|", "|").trim());
}

function table(lines, from, elements) {
  const heads = cellsOf(lines[from]);
  const row = (name, cells) => element("tr", {}, ...heads.map((_, index) => element(name, name === "th" ? { scope: "col" } : {}, ...inline(cells[index] ?? ""))));
  const body = element("tbody");
  let at = from + 2;
  while (at < lines.length && lines[at].includes("|")) {
    body.append(row("td", cellsOf(lines[at])));
    at += 1;
  }
  elements.push(element("div", { class: "scroller", tabindex: "0" }, element("table", {}, element("thead", {}, row("th", heads)), body)));
  return at;
}

/** A formula between $$ and $$, or between \\[ and \\], on lines of its own; unfinished, it is text. */
function blockFormula(lines, from, elements) {
  const close = lines[from].trim().startsWith("$$") ? "$$" : "\\]";
  const first = lines[from].trim().slice(2);
  const rest = [first, ...lines.slice(from + 1)];
  const end = rest.findIndex((line) => line.includes(close));
  const blank = rest.findIndex((line, index) => index > 0 && !line.trim());
  if (end < 0 || (blank >= 0 && blank < end)) {
    elements.push(element("p", {}, lines[from]));
    return from + 1;
  }
  const [last, after] = rest[end].split(close, 2);
  elements.push(element("p", { class: "formula", tabindex: "0" }, formula([...rest.slice(0, end), last].join("\n"), true)));
  if (after.trim()) elements.push(element("p", {}, ...inline(after.trim())));
  return from + end + 1;
}

/** Return a link, or only its text if it does not lead to a server. */
function link(label, target) {
  let url = null;
  try {
    url = new URL(target);
  } catch { /* relative: it would lead into this page */ }
  if (!url || !SCHEMES.has(url.protocol) || url.username || url.password) return null;
  return element("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label);
}

function inline(text, depth = 0) {
  const parts = [];
  let at = 0;
  for (const { 0: whole, index, groups } of text.matchAll(INLINE)) {
    const inner = (words) => (depth < MAX_NESTING ? inline(words, depth + 1) : [words]);
    const tex = groups.round ?? groups.double ?? groups.single;
    let made = null;
    if (groups.code !== undefined) made = element("code", {}, groups.code);
    else if (tex !== undefined) made = formula(tex, false);
    else if (groups.label !== undefined) made = link([groups.label], groups.target);
    else if (groups.bare !== undefined) made = link([groups.bare], groups.bare);
    else if (groups.strong !== undefined) made = element("strong", {}, ...inner(groups.strong));
    else made = element("em", {}, ...inner(groups.emphasis));
    parts.push(text.slice(at, index), made ?? whole);
    at = index + whole.length;
  }
  parts.push(text.slice(at));
  return parts.filter((part) => part !== "");
}
