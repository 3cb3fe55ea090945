// What the page asks the server, and what is said where it refuses. Knows no page.

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The state of /ready: {status, done, total, error}; status "gone" where nobody answers. */
export async function readiness() {
  try {
    return await (await fetch("ready", { signal: AbortSignal.timeout(5000) })).json();
  } catch {
    return { status: "gone" };
  }
}

/** In words, what a server does that is not ready. */
export function told({ status, done, total, error }) {
  if (status === "loading") return "The model is being loaded.";
  if (status === "compiling") {
    return total ? `Programs are being compiled: ${done} of ${total}.` : "Programs are being compiled.";
  }
  if (status === "stopping") return "The server is being stopped.";
  if (status === "failed") return `The engine has failed: ${error}`;
  return "The server does not answer.";
}

/** Each event of a streamed chat, as an object. Problem where the server refuses, or tells of an error later. */
export async function* chat(body, key, signal) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw signal.aborted ? error : new Problem("The server does not answer. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(`The answer has ended early: ${event.error.message}`);
      yield event;
    }
  } catch (error) {
    throw signal.aborted || error instanceof Problem ? error : new Problem("The connection broke in the middle.");
  }
  throw new Problem("The connection has ended before the answer.");
}

/** The data of each server-sent event of a stream of bytes. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  const { status } = response;
  let message = response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch { /* a proxy's answer */ }
  if (status === 401) message = "This server wants an API key. Enter a valid one under Parameters.";
  else if (status === 429) {
    message = `The server is busy: ${message}. Try again in ${response.headers.get("Retry-After") ?? "a few"} s.`;
  } else if (status === 503) {
    const state = await readiness();
    message = state.status === "ready" ? message : `${told(state)} Try again when it is ready.`;
  } else if (status === 400) message = `The server refuses this: ${message}`;
  return new Problem(message || `The server answers ${status}.`, status);
}
