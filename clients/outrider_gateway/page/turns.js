// Messages as they are shown: the reader's as text, an answer as Markdown, or by who made each token.

import { copyButton, element } from "./elements.js";
import { MarkdownView } from "./markdown.js";
import { jsonText, PartsView } from "./parts.js";

/** The reader's message, with what can be done to it. */
export function showQuestion(parent, content, edit) {
  const turn = element(parent, "article", "turn question");
  element(turn, "b", "", "you");
  element(turn, "div", "text", content);
  const actions = element(turn, "div", "row actions");
  action(actions, "Edit", edit);
  return turn;
}

function action(parent, label, run) {
  const button = element(parent, "button", "small", label);
  button.type = "button";
  button.addEventListener("click", run);
}

/** An answer that grows. */
export class AnswerTurn {
  text = "";
  #turn;
  #markdown;
  #view;
  #parts;
  #pieces;
  #working;
  #frame = 0;

  constructor(parent, title, again) {
    this.#turn = element(parent, "article", "turn answer");
    element(this.#turn, "b", "", title);
    this.#working = element(this.#turn, "p", "working", "waiting for the first token");
    this.#working.setAttribute("role", "status");
    const above = element(this.#turn, "div");
    this.#markdown = element(this.#turn, "div", "markdown");
    this.#parts = new PartsView(above, element(this.#turn, "div", "calls"));
    this.#view = new MarkdownView(this.#markdown);
    this.#pieces = element(this.#turn, "div", "pieces");
    const actions = element(this.#turn, "div", "row actions");
    copyButton(actions, "Copy", () => this.text);
    if (again) action(actions, "Regenerate", again);
  }

  /** The answer as a message of the API. */
  get message() {
    const { reasoning, calls } = this.#parts;
    return { role: "assistant", content: this.text, ...(reasoning && { reasoning }), ...(calls.length && { calls }) };
  }

  /** Adds a message that is whole. */
  addMessage({ content, reasoning, calls = [] }) {
    const pieces = calls.map(({ id, name, arguments: given }, index) => ({ index, id, function: { name, arguments: given } }));
    this.add({ content, reasoning_content: reasoning, tool_calls: pieces });
  }

  /** Adds what an event adds, and by whom its text was made: { text, drafted } each; none where nobody knows. */
  add(delta, pieces) {
    const content = delta.content ?? "";
    this.text += content;
    this.#parts.add(delta);
    if (this.some) this.#working.remove();
    for (const { text, drafted } of pieces ?? [{ text: content }]) {
      const kind = drafted === undefined ? "" : drafted ? "drafted" : "own";
      // Joined with what stands before it where it can be: fewer elements, and text that reads as one.
      const last = this.#pieces.lastChild;
      if (last && last.className === kind) last.textContent += text;
      else element(this.#pieces, "span", kind, text);
    }
    // One drawing a frame, whatever the tokens a second.
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#view.show(this.text);
    this.#parts.draw();
  }

  /** Whether anything has come. */
  get some() {
    return Boolean(this.text || this.#parts.reasoning || this.#parts.calls.length);
  }

  /** Ends the answer; `note` says how where it did not end by itself. */
  end(note) {
    this.draw();
    const json = jsonText(this.text);
    if (json) this.#view.showJson(json);
    this.#working.remove();
    if (note) element(this.#turn, "p", "ended", note);
  }

  remove() {
    cancelAnimationFrame(this.#frame);
    this.#turn.remove();
  }
}
