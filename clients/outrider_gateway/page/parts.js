// What an answer has besides text: the model's reasoning, folded, and its calls of tools.

import { element } from "./elements.js";
import { codeBlock } from "./markdown.js";

const indented = (json) => JSON.stringify(json, null, 2);

/** A text of JSON, indented; null for any other text, and for a number or a string, which reads as text. */
export function jsonText(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  try {
    return indented(JSON.parse(text));
  } catch {
    return null;
  }
}

/** Reasoning and calls of one answer, as they grow. */
export class PartsView {
  reasoning = "";
  calls = []; // { id, name, arguments }
  #above;
  #below;

  /** Shows them above and below an answer's text. */
  constructor(above, below) {
    this.#above = above;
    this.#below = below;
  }

  /** Adds what an event of a stream adds to the message. */
  add({ reasoning_content: reasoning, tool_calls: pieces }) {
    this.reasoning += reasoning ?? "";
    for (const { index, id, function: piece } of pieces ?? []) {
      const call = (this.calls[index] ??= { id, name: piece.name, arguments: "" });
      call.arguments += piece.arguments ?? "";
    }
  }

  draw() {
    if (this.reasoning) {
      const details = this.#above.firstChild ?? element(this.#above, "details", "reasoning");
      if (!details.firstChild) {
        element(details, "summary", "", "reasoning");
        element(details, "div", "text");
      }
      details.lastChild.textContent = this.reasoning;
    }
    this.#below.replaceChildren(
      ...this.calls.map(({ name, arguments: given }) => codeBlock(jsonText(given) ?? given, `calls ${name}`)),
    );
  }
}
