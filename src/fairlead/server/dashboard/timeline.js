// The totals of the last ten minutes: columns of equal length, as uPlot needs them, oldest first.

const KEPT_S = 600;
const MIN_SPAN_S = 60;
const INTERVAL_S = 1;
const NAMES = ["at_s", "waiting", "running", "oldest_wait_s", "rejected", "tokens_per_s", "cache_usage"];

let shownS = KEPT_S;
let columns = Object.fromEntries(NAMES.map((name) => [name, []]));

/** Begin with the server's history: the value of a `history` event. */
export function begin(kept) {
  columns = Object.fromEntries(NAMES.map((name) => [name, kept[name].slice()]));
}

/** Return the totals in a snapshot. */
export function totalsOf({ at_s, queue, rejected, tokens, cache_usage }) {
  return {
    at_s,
    waiting: queue.waiting,
    running: queue.running,
    oldest_wait_s: queue.oldest_wait_s,
    rejected: Object.values(rejected).reduce((sum, n) => sum + n, 0),
    tokens_per_s: tokens.generated_per_s,
    cache_usage,
  };
}

/** Add totals. They replace the last ones if these are less than a second after their predecessors. */
export function add(totals) {
  const times = columns.at_s;
  if (times.length && totals.at_s <= times.at(-1)) return; // the clock was set back, or these are stored
  const replaces = times.length > 1 && totals.at_s - times.at(-2) < INTERVAL_S;
  const old = times.findIndex((at) => at > totals.at_s - KEPT_S);
  for (const name of NAMES) {
    if (replaces) columns[name].pop();
    columns[name].push(totals[name]);
    if (old > 1) columns[name].splice(0, old - 1); // keeps one point left of the edge, where the line begins
  }
}

export const times = () => columns.at_s;

/** Choose how many seconds to show, at most ten minutes. */
export function chooseSpan(seconds) {
  shownS = seconds;
}

/** Return the span to show, in seconds since 1970: what was chosen, or less if less is known. */
export function span() {
  const to = columns.at_s.at(-1) ?? 0;
  const from = Math.min(columns.at_s[0] ?? 0, to - MIN_SPAN_S);
  return [Math.max(from, to - shownS), to];
}

/** Return a column to draw. Of rejections, which only grow, it has those of the minute before each row. */
export function column(name) {
  if (name !== "rejected") return columns[name];
  const { at_s, rejected } = columns;
  let from = 0;
  return rejected.map((n, i) => {
    while (at_s[from] < at_s[i] - 60) from += 1;
    return n - rejected[from];
  });
}

/** Return the number of rejections in the whole timeline. */
export const recentlyRejected = () => (columns.rejected.at(-1) ?? 0) - (columns.rejected[0] ?? 0);

/** Return the index of the totals that many seconds before the last; -1 if there are none. */
export function indexBefore(seconds) {
  const wanted = columns.at_s.at(-1) - seconds;
  return columns.at_s.findLastIndex((at) => at <= wanted + INTERVAL_S / 2);
}
