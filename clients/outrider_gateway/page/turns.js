// Messages as they are shown: the reader's as text, an answer as Markdown, or by who made each token.

import { copyButton, element } from "./elements.js";
import { MarkdownView } from "./markdown.js";

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
  #pieces;
  #working;
  #frame = 0;

  constructor(parent, title, again) {
    this.#turn = element(parent, "article", "turn answer");
    element(this.#turn, "b", "", title);
    this.#working = element(this.#turn, "p", "working", "waiting for the first token");
    this.#working.setAttribute("role", "status");
    this.#markdown = element(this.#turn, "div", "markdown");
    this.#view = new MarkdownView(this.#markdown);
    this.#pieces = element(this.#turn, "div", "pieces");
    const actions = element(this.#turn, "div", "row actions");
    copyButton(actions, "Copy", () => this.text);
    if (again) action(actions, "Regenerate", again);
  }

  /** Adds text, and by whom its parts were made: { text, drafted } each; none where nobody knows. */
  add(content, pieces) {
    this.text += content;
    if (this.text) this.#working.remove();
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
  }

  /** Ends the answer; `note` says how where it did not end by itself. */
  end(note) {
    this.draw();
    this.#working.remove();
    if (note) element(this.#turn, "p", "ended", note);
  }

  remove() {
    cancelAnimationFrame(this.#frame);
    this.#turn.remove();
  }
}
