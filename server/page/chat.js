// The conversation: what was said, what is being written, and the keys and buttons for it.
// What the model writes becomes text nodes, never markup.

import { chat, Problem } from "./api.js";
import { element } from "./chart.js";
import { duration } from "./figures.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const ENDS = { length: "cut at the greatest length", abort: "ended by the server" };

/** One message on the page. */
class Shown {
  constructor(role) {
    this.text = document.createTextNode("");
    this.thoughts = document.createTextNode("");
    this.note = element("div", { class: "note" });
    const said = element("div", { class: "text", dir: "auto" }, this.text);
    this.node = element("li", { class: `message ${role}` }, element("div", { class: "who" }, role === "user" ? "You" : "Model"));
    this.node.append(said, ...(role === "user" ? [] : [this.note]));
    this.said = said;
  }

  think(text) {
    if (!this.thoughts.length) {
      const shown = element("details", { class: "thoughts", open: "" }, element("summary", {}, "Thoughts"));
      shown.append(element("pre", { dir: "auto" }, this.thoughts));
      this.said.before(shown);
    }
    this.thoughts.appendData(text);
  }
}

export class Conversation {
  /** `nodes` are the page's elements by id; `wantsKey()` is called where the server asks for a key. */
  constructor(nodes, wantsKey) {
    Object.assign(this, { nodes, wantsKey });
    this.messages = []; // {role, content, shown}
    this.running = null; // an AbortController
    nodes.composer.addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    nodes.stop.addEventListener("click", () => this.stop());
    nodes.again.addEventListener("click", () => this.regenerate());
    nodes.new.addEventListener("click", () => this.restart());
    nodes.input.addEventListener("input", () => this.fit());
    nodes.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    this.atEnd = true; // the end of the log is seen, and stays so
    nodes.log.addEventListener("scroll", () => {
      this.atEnd = nodes.log.scrollHeight - nodes.log.scrollTop - nodes.log.clientHeight < 40;
    });
    new ResizeObserver(() => this.follow()).observe(nodes.log);
  }

  follow() {
    if (this.atEnd) this.nodes.log.scrollTop = this.nodes.log.scrollHeight;
  }

  send() {
    const content = this.nodes.input.value.trim();
    if (this.running || !content) return;
    this.nodes.input.value = "";
    this.fit();
    this.add("user", content);
    this.answer();
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.update();
  }

  regenerate() {
    if (this.running || !this.messages.length) return;
    if (this.messages.at(-1).role === "assistant") this.messages.pop().shown.node.remove();
    this.answer();
  }

  restart() {
    this.stop();
    this.messages = [];
    this.nodes.messages.replaceChildren();
    this.tell(null);
    this.update();
    this.nodes.input.focus();
  }

  add(role, content) {
    const message = { role, content, shown: new Shown(role) };
    message.shown.text.data = content;
    this.messages.push(message);
    this.nodes.messages.append(message.shown.node);
    this.atEnd = true;
    this.follow();
    return message;
  }

  /** Ask for an answer to what has been said, and write it as it comes. */
  async answer() {
    this.tell(null);
    let body;
    try {
      body = this.request();
    } catch (problem) {
      this.tell(problem.message);
      this.update();
      return;
    }
    const running = (this.running = new AbortController());
    const message = this.add("assistant", "");
    message.shown.node.classList.add("writing");
    this.update();
    try {
      await this.write(message, chat(body, this.nodes.fields.elements.key.value.trim(), running.signal));
    } catch (problem) {
      this.failed(message, problem, running);
    }
    message.shown.node.classList.remove("writing");
    if (this.running === running) this.running = null;
    this.update();
  }

  async write(message, events) {
    const begun = performance.now();
    let first = null;
    let end = null;
    let usage = null;
    for await (const event of events) {
      const choice = event.choices[0];
      usage = event.usage ?? usage;
      if (!choice) continue;
      first ??= performance.now();
      if (choice.delta.reasoning_content) message.shown.think(choice.delta.reasoning_content);
      message.content += choice.delta.content ?? "";
      message.shown.text.appendData(choice.delta.content ?? "");
      end = choice.finish_reason ?? end;
      this.follow();
    }
    const tokens = usage?.completion_tokens ?? 0;
    const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
    if (first !== null) parts.push(`first after ${duration((first - begun) / 1000)}`);
    const seconds = (performance.now() - first) / 1000;
    if (first !== null && tokens > 1 && seconds > 0) parts.push(`then ${((tokens - 1) / seconds).toFixed(1)} a second`);
    if (ENDS[end]) parts.push(ENDS[end]);
    message.shown.note.textContent = parts.join(" · ");
    this.follow();
  }

  failed(message, problem, running) {
    const stopped = running.signal.aborted;
    if (stopped) message.shown.note.textContent = "stopped";
    else if (!message.content && !message.shown.thoughts.length) {
      message.shown.node.remove();
      this.messages = this.messages.filter((other) => other !== message);
    }
    if (stopped) return;
    this.tell(problem instanceof Problem ? problem.message : `The page has failed: ${problem.message}`);
    if (problem.status === 401) this.wantsKey();
  }

  /** The body of the request. Problem for a field that is wrong. */
  request() {
    const fields = this.nodes.fields.elements;
    const body = { stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const field = fields[name];
      const label = field.labels[0].firstChild.textContent.trim();
      if (!field.validity.valid) throw new Problem(`${label}: ${field.validationMessage}`);
      if (field.value !== "") body[name] = Number(field.value);
    }
    const stop = fields.stop.value.split("\n").filter((line) => line);
    if (stop.length) body.stop = stop;
    const system = fields.system.value.trim();
    const said = this.messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
    body.messages = system ? [{ role: "system", content: system }, ...said] : said;
    return body;
  }

  tell(problem) {
    this.nodes.problem.hidden = problem === null;
    this.nodes.problem.textContent = problem ?? "";
    this.atEnd ||= problem !== null;
    this.follow();
  }

  update() {
    const writing = this.running !== null;
    const hadFocus = document.activeElement;
    this.nodes.stop.hidden = !writing;
    this.nodes.send.hidden = writing;
    this.nodes.again.disabled = writing || !this.messages.length;
    this.nodes.empty.hidden = this.messages.length > 0;
    this.nodes.log.setAttribute("aria-busy", String(writing)); // read out when it is complete
    if ([this.nodes.stop, this.nodes.send, this.nodes.again].includes(hadFocus)) this.nodes.input.focus();
  }

  fit() {
    const { input } = this.nodes;
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }
}
