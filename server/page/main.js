// Puts the parts of the page together: the server's state, the conversation, the figures.

import { readiness, told } from "./api.js";
import { Conversation } from "./chat.js";
import { Figures } from "./figures.js";

const KEY = "jaxserve-api-key";
const READY_POLL_MS = 1000;

const nodes = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
const views = [...document.querySelectorAll("nav button")];
const key = nodes.fields.elements.key;
let polling = false;

function look(view) {
  document.body.dataset.view = view;
  for (const button of views) button.setAttribute("aria-pressed", String(button.dataset.view === view));
}

function show(state) {
  const { status, done, total } = state;
  nodes.status.dataset.state = status;
  nodes.status.textContent = status === "compiling" && total ? `compiling ${done}/${total}` : status;
  if (status === "gone") nodes.status.textContent = "no answer";
  nodes.starting.hidden = status === "ready";
  nodes["starting-text"].textContent = status === "ready" ? "" : told(state);
  const { "starting-progress": progress } = nodes;
  progress.hidden = !["loading", "compiling"].includes(status);
  if (total) [progress.max, progress.value] = [total, done];
  else progress.removeAttribute("value");
}

/** Ask until the server is ready. */
async function await_ready() {
  if (polling) return;
  polling = true;
  for (;;) {
    const state = await readiness();
    show(state);
    if (state.status === "ready") break;
    await new Promise((resolve) => setTimeout(resolve, READY_POLL_MS));
  }
  polling = false;
}

for (const button of views) button.addEventListener("click", () => look(button.dataset.view));
key.value = sessionStorage.getItem(KEY) ?? "";
key.addEventListener("change", () => sessionStorage.setItem(KEY, key.value));
nodes.fields.addEventListener("submit", (event) => event.preventDefault());

new Conversation(nodes, () => {
  look("parameters");
  key.focus();
});
const figures = new Figures({
  charts: nodes.charts,
  totals: nodes.totals,
  stale: nodes.stale,
  told: (model) => { nodes.model.textContent = model ?? ""; },
  lost: await_ready,
});
await_ready();
figures.run();
nodes.input.focus();
