// One small plot of the last minutes. All plots share a cursor: pointing at one shows that time in each.

import uPlot from "./vendor/uPlot.esm.js";
import { span, times } from "./timeline.js";

const sync = uPlot.sync("totals");
const HEIGHT = 92;
const AXIS_PX = 44;
const LABEL_PX = 48;

/**
 * Draw into `host`. `floor` is the least upper end of the y axis, so that small values do not look large.
 * `show` formats values on that axis. `onPoint` is called with the index under the cursor, or null. Returns
 * `{draw(values)}`.
 */
export function plotIn(host, { floor, stepped, show, onPoint }) {
  const colour = () => getComputedStyle(host).color;
  const soft = () => getComputedStyle(host.parentElement.querySelector(".span")).color;
  const line = () => getComputedStyle(host).borderBottomColor;
  const axis = {
    stroke: soft,
    font: `11px ${getComputedStyle(document.documentElement).fontFamily}`,
    grid: { stroke: line, width: 1 },
    ticks: { show: false },
    gap: 4,
  };
  const plot = new uPlot(
    {
      width: Math.max(host.clientWidth, 20),
      height: HEIGHT,
      padding: [6, 2, 0, 0],
      legend: { show: false },
      axes: [
        { ...axis, size: 18, splits: (plot) => minutes(plot.width), values: (_, splits) => splits.map((at) => ago(at - span()[1])) },
        { ...axis, size: AXIS_PX, space: 26, values: (_, splits) => splits.map((value) => show(value)) },
      ],
      cursor: { sync: { key: sync.key }, y: false, drag: { x: false, y: false }, points: { size: 5, fill: colour } },
      scales: {
        x: { time: false, range: span },
        y: { range: (_, __, most) => [0, Math.max(most ?? 0, floor) * 1.05] },
      },
      series: [
        {},
        {
          stroke: colour,
          width: 1.5,
          fill: () => colour().replace("rgb(", "rgba(").replace(")", ", 0.12)"),
          points: { show: false },
          paths: stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear(),
        },
      ],
      hooks: { setCursor: [({ cursor }) => onPoint(cursor.left >= 0 ? cursor.idx : null)] },
    },
    [[], []],
    host,
  );
  new ResizeObserver(() => plot.setSize({ width: Math.max(host.clientWidth, 20), height: HEIGHT })).observe(host);
  addEventListener("themechange", () => requestAnimationFrame(() => plot.redraw(false)));
  return { draw: (values) => plot.setData([times(), values]) };
}

/** Return the times to mark in a plot of this width, in round steps before now. */
function minutes(width) {
  const [from, to] = span();
  const most = Math.max(1.5, (width - AXIS_PX) / LABEL_PX);
  const step = [15, 30, 60, 120, 180].find((seconds) => (to - from) / seconds <= most) ?? 300;
  return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, index) => to - index * step).reverse();
}

/** Write how long ago a time was: −5:00. */
function ago(seconds) {
  const whole = Math.round(-seconds);
  return whole <= 0 ? "0" : `−${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
