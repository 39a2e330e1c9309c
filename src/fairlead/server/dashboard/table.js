// A table whose rows are updated in place, so that the focus and a selection of text are kept.

import { element, setAttribute, setText } from "./element.js";
import { translate } from "./words.js";

/**
 * A table in `host`. A column has `head`, the key of its words, `show(row)`, which returns a text or an
 * element, and perhaps `number`, for columns of figures, and `title(row)`, the text that is shown on pointing.
 * `keyOf(row)` names a row. `empty`: the key of the words that are shown without rows.
 */
export class Table {
  constructor(host, columns, { keyOf, empty, label }) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.emptyWords = empty;
    this.labelWords = label;
    this.lines = new Map();
    this.heads = columns.map(({ number }) => element("th", { scope: "col", ...(number ? { class: "number" } : {}) }));
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.empty = element("p", { class: "empty" });
    this.scroller = element("div", { class: "scroller", tabindex: "0", role: "group" }, this.table);
    host.append(this.scroller, this.empty);
    this.rows = null;
  }

  /** Show rows in this order; null: they are not known yet. */
  fill(rows) {
    this.rows = rows;
    this.draw();
  }

  /** Draw the rows again, perhaps in another language. */
  draw() {
    this.columns.forEach(({ head }, index) => setText(this.heads[index], translate(head)));
    setAttribute(this.scroller, "aria-label", translate(this.labelWords));
    const rows = this.rows ?? [];
    const keys = new Set(rows.map(this.keyOf));
    for (const [key, line] of this.lines) {
      if (keys.has(key)) continue;
      line.element.remove();
      this.lines.delete(key);
    }
    let next = this.body.firstChild;
    for (const row of rows) {
      const line = this.line(this.keyOf(row));
      this.columns.forEach((column, index) => fillCell(line.cells[index], column, row));
      if (line.element === next) next = next.nextSibling;
      else this.body.insertBefore(line.element, next);
    }
    this.scroller.hidden = !rows.length;
    this.empty.hidden = Boolean(rows.length);
    setText(this.empty, this.rows ? translate(this.emptyWords) : "…");
  }

  line(key) {
    if (!this.lines.has(key)) {
      const cells = this.columns.map(({ number }, index) => {
        const options = number ? { class: "number" } : {};
        return index ? element("td", options) : element("th", { scope: "row", ...options });
      });
      this.lines.set(key, { cells, element: element("tr", { "data-row": key }, ...cells) });
    }
    return this.lines.get(key);
  }
}

function fillCell(cell, { show, title }, row) {
  const value = show(row, cell);
  if (value instanceof Node) {
    if (cell.firstChild !== value) cell.replaceChildren(value);
  } else {
    setText(cell, value ?? "");
  }
  if (title) setAttribute(cell, "title", title(row) || null);
}

/** Return the cell's element, made once by `make`: for elements that are updated in place. */
export function once(cell, make) {
  cell.kept ??= make();
  return cell.kept;
}
