// The figures of answers: speed, tokens a step, accepted drafts by step, and the last tree.

import { at } from "./elements.js";
import { describeTree, drawTree } from "./tree.js";

const LONGEST = 120; // steps that are drawn
const EVERY = 100; // milliseconds between two drawings

/** Figures of one answer, with drafts or without. */
export class AnswerFigures {
  #speculation;
  #accepted = [];
  #tokens = 0;
  #begun = 0;
  #drawn = 0;
  #last = null; // the last tree that had drafts, and its step
  #hasTrees = false; // whether the target reports trees at all

  constructor(speculation) {
    this.#speculation = speculation;
  }

  /** Counts one event of an answer; `outrider` is the field of that name. */
  add({ accepted_by_step = [], tokens = 0, totals, tree, step } = {}) {
    this.#accepted.push(...accepted_by_step);
    this.#hasTrees ||= Boolean(tree);
    if (tree?.tokens.length > 1) this.#last = { tree, step };
    const now = performance.now();
    if (this.#begun) this.#tokens += tokens;
    this.#begun ||= now;
    if (now - this.#drawn > EVERY) this.#draw(now);
    if (totals) this.#fill([totals.tokens_per_second ?? "–", totals.mean_accepted_length.toFixed(2), totals.steps]);
  }

  /** Draws what is left at the end. */
  end() {
    if (!this.#speculation) return;
    drawSteps(this.#accepted);
    this.#showTree();
  }

  #draw(now) {
    this.#drawn = now;
    // The first events of an answer bring neither time nor steps.
    const rate = this.#tokens && now > this.#begun ? ((1000 * this.#tokens) / (now - this.#begun)).toFixed(1) : "…";
    const steps = this.#accepted.length;
    const sum = this.#accepted.reduce((sum, count) => sum + count, 0);
    this.#fill([rate, steps ? (1 + sum / steps).toFixed(2) : "…", steps]);
    if (this.#speculation) drawSteps(this.#accepted);
    if (this.#last) this.#showTree();
  }

  #fill(values) {
    const row = at(this.#speculation ? "row-on" : "row-off");
    [...row.querySelectorAll("td")].forEach((cell, column) => (cell.textContent = values[column]));
  }

  #showTree() {
    if (this.#last) drawTree(at("tree"), this.#last.tree);
    else at("tree").replaceChildren();
    const drafted = this.#accepted.some((count) => count > 0);
    const without =
      drafted && !this.#hasTrees ? "the target's device chose the rows of each step, and reports no tree" : "no step had drafts";
    at("tree-text").textContent = this.#last ? describeTree(this.#last.tree, this.#last.step) : without;
  }
}

function drawSteps(accepted) {
  const shown = accepted.slice(-LONGEST);
  const most = Math.max(1, ...shown);
  at("steps").replaceChildren(
    ...shown.map((count) => {
      const bar = document.createElement("span");
      bar.style.height = `${(100 * count) / most}%`;
      return bar;
    }),
  );
  const all = accepted.reduce((sum, count) => sum + count, 0);
  at("steps-text").textContent = accepted.length
    ? `${all} drafted tokens accepted in ${accepted.length} steps, ${Math.max(...accepted)} at most, ${accepted.at(-1)} in the last`
    : "none yet";
}
