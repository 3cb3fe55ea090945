// Prometheus' text format read, and what its histograms say of a span of time. Knows no page.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** {name: [{labels, value}]} of an exposition. */
export function parse(text) {
  const families = {};
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
    const value = found[3] === "+Inf" ? Infinity : Number(found[3]);
    (families[found[1]] ??= []).push({ labels, value });
  }
  return families;
}

/** The sum over the labels; undefined where there is no such metric. */
export function sum(families, name) {
  return families[name]?.reduce((total, sample) => total + sample.value, 0);
}

/** [[upper bound, observations up to it]] by bound, summed over the other labels. */
export function buckets(families, name) {
  const found = new Map();
  for (const { labels, value } of families[name] ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return [...found].sort(([a], [b]) => a - b);
}

/** What was observed between two readings of the same buckets. */
export function between(before, after) {
  return after.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
}

/**
 * The quantile of cumulative buckets, linear within a bucket as PromQL's histogram_quantile; null without observations.
 * What lies beyond the last finite bound counts as that bound.
 */
export function quantile(share, cumulative) {
  const total = cumulative.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = share * total;
  const index = cumulative.findIndex(([, count]) => count >= rank);
  const [upper, count] = cumulative[index];
  if (upper === Infinity) return cumulative[index - 1]?.[0] ?? null;
  const [lower, below] = index > 0 ? cumulative[index - 1] : [0, 0];
  return count === below ? upper : lower + (upper - lower) * ((rank - below) / (count - below));
}
