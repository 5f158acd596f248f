// The conversation and its settings, kept in this browser over a reload until they are deleted. The API key is not kept.

const KEY = "outrider.conversation";
const UNRUN = "not run: this page only shows calls";

/** Messages, oldest first: { role, content }, of an answer also its `reasoning`, its `calls` of tools as { id, name,
 * arguments }, and `stopped` where the reader ended it. */
export class Conversation {
  messages = [];

  constructor() {
    this.messages = read().messages ?? [];
  }

  /** Keeps the messages, behind them what an unfinished answer has so far, and `settings`. */
  keep(settings, unfinished) {
    const last = unfinished ? [{ ...unfinished, stopped: true }] : [];
    try {
      localStorage.setItem(KEY, JSON.stringify({ messages: [...this.messages, ...last], settings }));
    } catch {
      // A browser that keeps nothing, or is full: the conversation lasts as long as the page.
    }
  }

  /** What `keep` was given last. */
  get settings() {
    return read().settings ?? {};
  }

  /** The messages for the API, behind a system prompt if there is one. */
  request(system) {
    const messages = this.messages.flatMap(asApi);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** Ends the conversation before message `index`, and returns what stood there. */
  cut(index) {
    return this.messages.splice(index);
  }
}

/** A message as the API has it. Every call has a result, as templates expect: that this page runs none. */
function asApi({ role, content, calls = [] }) {
  const said = { role, content };
  if (calls.length) {
    said.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  }
  return [said, ...calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: UNRUN }))];
}

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    const sound = Array.isArray(kept.messages) && kept.messages.every(isMessage);
    return { messages: sound ? kept.messages : [], settings: kept.settings ?? {} };
  } catch {
    return {};
  }
}

function isMessage(message) {
  return ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
}
