// The engine's figures, read from /metrics every second and drawn.

import { Chart, element } from "./chart.js";
import { between, buckets, parse, quantile, sum } from "./prometheus.js";

const POLL_MS = 1000;
const POINTS = 120;
const RATE_READINGS = 5; // a rate is the mean over so many readings
const LATENCY_READINGS = 30;

const RUNNING = "jaxserve:num_requests_running";
const WAITING = "jaxserve:num_requests_waiting";
const PAGES_USED = "jaxserve:kv_cache_usage_perc";
const CONFIG = "jaxserve:cache_config_info";
const GENERATED = "jaxserve:generation_tokens_total";
const PROMPTS = "jaxserve:prompt_tokens_total";
const FIRST_TOKEN = "jaxserve:time_to_first_token_seconds_bucket";
const NEXT_TOKEN = "jaxserve:inter_token_latency_seconds_bucket";
const TOTALS = [
  ["Requests answered", "jaxserve:request_success_total"],
  ["Tokens generated", GENERATED],
  ["Tokens of prompts", PROMPTS],
  ["Prompt tokens found in the cache", "jaxserve:prefix_cache_hits_total"],
  ["Preemptions", "jaxserve:num_preemptions_total"],
];

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const whole = new Intl.NumberFormat("en");

export function duration(seconds) {
  return seconds < 1 ? `${number.format(seconds * 1000)} ms` : `${number.format(seconds)} s`;
}

function percent(share) {
  return `${number.format(100 * share)} %`;
}

export class Figures {
  /** `told(model name)` after each reading, `lost()` where there was none. */
  constructor({ charts, totals, stale, told, lost }) {
    Object.assign(this, { totals, stale, told, lost });
    this.readings = [];
    const shared = { size: POINTS, span: `${(POINTS * POLL_MS) / 60000} min ago` };
    const queue = { series: ["running", "waiting"], show: number.format, top: 1 };
    this.queue = new Chart({ title: "Requests", ...queue, ...shared });
    const pages = { show: (share) => this.pagesOf(share), mark: percent, top: 1 };
    this.pages = new Chart({ title: "Pages", series: ["used"], ...pages, ...shared });
    const speed = { series: ["generated", "prompts"], show: number.format, top: 10 };
    this.speed = new Chart({ title: "Tokens per second", ...speed, ...shared });
    const latency = { series: ["p50", "p99"], show: duration, top: 0.01, ...shared };
    this.first = new Chart({ title: "Time to first token", ...latency });
    this.next = new Chart({ title: "Time between tokens", ...latency });
    charts.append(...[this.queue, this.pages, this.speed, this.first, this.next].map((chart) => chart.node));
  }

  /** Read again and again, while anybody looks. */
  async run() {
    for (;;) {
      if (!document.hidden) await this.read();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async read() {
    try {
      const response = await fetch("metrics", { signal: AbortSignal.timeout(5000) });
      if (!response.ok) throw new Error(response.statusText);
      this.take(parse(await response.text()), performance.now() / 1000);
      this.stale.hidden = true;
    } catch {
      this.stale.hidden = false;
      this.lost();
    }
  }

  take(families, time) {
    const last = this.readings.at(-1);
    const restarted = last && (sum(families, GENERATED) ?? 0) < (sum(last.families, GENERATED) ?? 0);
    if (restarted) this.readings = [];
    this.readings.push({ families, time });
    if (this.readings.length > LATENCY_READINGS) this.readings.shift();
    const info = families[CONFIG]?.[0]?.labels ?? {};
    this.numPages = Number(info.num_pages) || 0;
    this.queue.add([sum(families, RUNNING) ?? null, sum(families, WAITING) ?? null]);
    this.pages.add([sum(families, PAGES_USED) ?? null]);
    this.speed.add([this.rate(GENERATED), this.rate(PROMPTS)]);
    this.first.add(this.latencies(FIRST_TOKEN));
    this.next.add(this.latencies(NEXT_TOKEN));
    this.totals.replaceChildren(...TOTALS.flatMap(([said, name]) =>
      [element("dt", {}, said), element("dd", {}, whole.format(sum(families, name) ?? 0))]));
    this.told(info.model_name);
  }

  rate(name) {
    const now = this.readings.at(-1);
    const before = this.readings.at(-1 - RATE_READINGS) ?? this.readings[0];
    const count = sum(now.families, name);
    if (count === undefined || now === before) return null;
    return (count - (sum(before.families, name) ?? 0)) / (now.time - before.time);
  }

  latencies(name) {
    const [before, after] = [this.readings[0], this.readings.at(-1)].map(({ families }) => buckets(families, name));
    const observed = between(before, after);
    return [quantile(0.5, observed), quantile(0.99, observed)];
  }

  pagesOf(share) {
    const total = this.numPages;
    return total ? `${whole.format(Math.round(share * total))} of ${whole.format(total)}` : percent(share);
  }
}
