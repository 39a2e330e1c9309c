// The totals of the last ten minutes: columns of equal length, as uPlot wants them, oldest first.

const SPAN_S = 600;
const LEAST_SPAN_S = 60;
const APART_S = 1;
const NAMES = ["at_s", "waiting", "running", "mean_wait_s", "rejected", "tokens_per_s", "cache_usage"];

let columns = Object.fromEntries(NAMES.map((name) => [name, []]));

/** Begin with what the server has kept: the value of a `history` event. */
export function begin(kept) {
  columns = Object.fromEntries(NAMES.map((name) => [name, kept[name].slice()]));
}

/** The totals in a snapshot. */
export function totalsOf({ at_s, queue, rejected, tokens, cache_usage }) {
  return {
    at_s,
    waiting: queue.waiting,
    running: queue.running,
    mean_wait_s: queue.mean_wait_s,
    rejected: Object.values(rejected).reduce((sum, n) => sum + n, 0),
    tokens_per_s: tokens.generated_per_s,
    cache_usage,
  };
}

/** Add totals. Those that come more often than every second take the place of the last. */
export function add(totals) {
  const times = columns.at_s;
  if (times.length && totals.at_s <= times.at(-1)) return; // the clock was set back, or it is there already
  const replaces = times.length > 1 && totals.at_s - times.at(-2) < APART_S;
  const old = times.findIndex((at) => at > totals.at_s - SPAN_S);
  for (const name of NAMES) {
    if (replaces) columns[name].pop();
    columns[name].push(totals[name]);
    if (old > 1) columns[name].splice(0, old - 1); // one point to the left of the edge, for the line to come from
  }
}

export const times = () => columns.at_s;

/** The span to show, in seconds since 1970: ten minutes, or what there is of them, but one minute at least. */
export function span() {
  const to = columns.at_s.at(-1) ?? 0;
  const from = Math.min(columns.at_s[0] ?? 0, to - LEAST_SPAN_S);
  return [Math.max(from, to - SPAN_S), to];
}

/** A column, ready to be drawn. Rejections, which only grow, as how many there were in the minute before. */
export function column(name) {
  if (name !== "rejected") return columns[name];
  const { at_s, rejected } = columns;
  let from = 0;
  return rejected.map((n, i) => {
    while (at_s[from] < at_s[i] - 60) from += 1;
    return n - rejected[from];
  });
}

/** How many were rejected in all of the time. */
export const rejectedLately = () => (columns.rejected.at(-1) ?? 0) - (columns.rejected[0] ?? 0);

/** The index of what was so many seconds before the last totals; -1 if nothing was. */
export function indexBefore(seconds) {
  const wanted = columns.at_s.at(-1) - seconds;
  return columns.at_s.findLastIndex((at) => at <= wanted + APART_S / 2);
}
