// The conversation and its settings, kept in this browser over a reload until they are deleted. The API key is not kept.

const KEY = "outrider.conversation";

/** Messages as the API has them, oldest first: { role, content }, and `stopped` where the reader ended an answer. */
export class Conversation {
  messages = [];

  constructor() {
    this.messages = read().messages ?? [];
  }

  /** Keeps the messages, behind them what an unfinished answer has so far, and `settings`. */
  keep(settings, unfinished = "") {
    const last = unfinished ? [{ role: "assistant", content: unfinished, stopped: true }] : [];
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
    const messages = this.messages.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** Ends the conversation before message `index`, and returns what stood there. */
  cut(index) {
    return this.messages.splice(index);
  }
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
