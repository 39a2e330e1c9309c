// One small plot of the last ten minutes. All plots share a cursor: pointing at one shows that time in each.

import uPlot from "./vendor/uPlot.esm.js";
import { span, times } from "./timeline.js";

const sync = uPlot.sync("totals");
const HEIGHT = 56;

/**
 * Draw into `host`. `floor` is the least upper end of the y axis, so that small values do not look large.
 * `onPoint` is called with the index under the cursor, or null. Returns `{draw(values)}`.
 */
export function plotIn(host, { floor, stepped, onPoint }) {
  const colour = () => getComputedStyle(host).color;
  const plot = new uPlot(
    {
      width: Math.max(host.clientWidth, 20),
      height: HEIGHT,
      padding: [3, 0, 1, 0],
      legend: { show: false },
      axes: [{ show: false }, { show: false }],
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
