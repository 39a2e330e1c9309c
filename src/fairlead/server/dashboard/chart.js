// A chart over time with axes, a legend and the values at the cursor. Independent of what it shows.

import { element, setText } from "./element.js";
import uPlot from "./vendor/uPlot.esm.js";
import { currentLanguage } from "./words.js";

const HEIGHT = 240;
const NARROW_PX = 480;
const COLOURS = ["--accent", "--second", "--third", "--fourth", "--fifth", "--sixth"];

/**
 * A chart in `host`. `show(value)` formats a value. `bars`: as columns that begin at zero, one above the other.
 */
export class Chart {
  constructor(host, { show, bars = false }) {
    this.host = host;
    this.show = show;
    this.bars = bars;
    this.legend = element("ul", { class: "legend" });
    this.drawn = element("div", { class: "chart", role: "img" });
    host.append(this.legend, this.drawn);
    this.names = "";
    new ResizeObserver(() => this.resize()).observe(host);
    addEventListener("themechange", () => requestAnimationFrame(() => this.remake()));
  }

  /** Draw columns over times in seconds since 1970. `lines`: their `name`, `values` and perhaps `dashed`. */
  draw(times, lines, label) {
    this.times = times;
    this.step = times.length > 1 ? times[1] - times[0] : 1;
    this.lines = lines;
    this.drawn.setAttribute("aria-label", label);
    const names = JSON.stringify([currentLanguage(), lines.map(({ name }) => name)]);
    if (names !== this.names) {
      this.names = names;
      this.remake();
    } else this.plot.setData(this.data());
    const { left, idx } = this.plot.cursor;
    this.caption(left >= 0 ? idx : null);
  }

  /** Return what is drawn. Of stacked columns the highest comes first, so that the others are seen before it. */
  data() {
    if (!this.bars) return [this.times, ...this.lines.map(({ values }) => values)];
    const sums = this.times.map(() => 0);
    const stacked = this.lines.map(({ values }) => values.map((value, index) => (sums[index] += value ?? 0)));
    return [this.times, ...stacked.reverse()];
  }

  resize() {
    if (this.plot && this.host.clientWidth) this.plot.setSize({ width: this.host.clientWidth, height: HEIGHT });
  }

  remake() {
    if (!this.lines) return;
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colourOf = (name) => {
      const probe = element("i");
      probe.style.color = `var(${name})`;
      this.host.append(probe);
      const colour = getComputedStyle(probe).color;
      probe.remove();
      return colour;
    };
    const [soft, line] = [colourOf("--soft"), colourOf("--line")];
    const axis = { stroke: soft, font: `12px ${style.fontFamily}`, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
    const colours = this.lines.map((_, index) => colourOf(COLOURS[index % COLOURS.length]));
    const paths = this.bars ? uPlot.paths.bars({ size: [0.8, 60], align: 1 }) : uPlot.paths.linear();
    const series = this.lines.map(({ name, dashed }, index) => ({
      label: name,
      stroke: colours[index],
      width: this.bars ? 0 : 1.75,
      dash: dashed ? [5, 4] : undefined,
      fill: this.bars ? colours[index] : undefined,
      points: { show: !this.bars && this.lines[index].values.filter((value) => value !== null).length < 2 },
      spanGaps: true,
      paths,
    }));
    this.plot = new uPlot({
      width: Math.max(this.host.clientWidth, 40),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 28, 0, 0],
      drawOrder: ["axes", "series"],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true, range: (_, from, to) => [from, this.bars ? to + this.step : to] }, y: { range: (_, __, most) => [0, (most || 1) * 1.1] } },
      axes: [
        { ...axis, space: this.host.clientWidth < NARROW_PX ? 70 : 90, values: (_, splits, __, ___, step) => splits.map((at) => clock(at, step)) },
        { ...axis, size: 64, values: (_, splits) => splits.map((value) => this.show(value)) },
      ],
      series: [{}, ...(this.bars ? series.reverse() : series)],
      hooks: { setCursor: [({ cursor }) => this.caption(cursor.left >= 0 ? cursor.idx : null)] },
    }, this.data(), this.drawn);
    this.colours = colours;
    this.caption(null);
  }

  /** Write the names of the lines, with their values at the cursor. */
  caption(index) {
    if (!this.colours) return;
    const items = this.lines.map(({ name, values }, line) => {
      const mark = element("span", { class: "swatch", "aria-hidden": "true" });
      mark.style.background = this.colours[line];
      const value = index === null ? null : values[index];
      return element("li", {}, mark, value === null || value === undefined ? name : `${name} ${this.show(value)}`);
    });
    const at = element("li", { class: "at" });
    setText(at, index === null || this.times[index] === undefined ? "" : clock(this.times[index], 1));
    this.legend.replaceChildren(...items, at);
  }
}

/** Format a time of day; of long steps the day. */
export function clock(at, step) {
  const options = step >= 86_400 ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  return new Intl.DateTimeFormat(currentLanguage(), options).format(new Date(at * 1000));
}
