// The chat page: what is typed, what is shown, and the figures beside it.

import { answer, models } from "./stream.js";
import { describeTree, drawTree } from "./tree.js";

const LONGEST = 120; // steps that are drawn
const at = (id) => document.getElementById(id);
const [log, error, message, send, stop] = ["log", "error", "message", "send", "stop"].map(at);
const conversation = [];
let served = null;
let running = null;

function element(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function fail(problem) {
  error.hidden = !problem;
  error.textContent = problem ?? "";
}

/** A place for one answer, whose pieces are coloured by who made them. */
function place(parent, title) {
  const turn = element(parent, "div", "turn answer");
  element(turn, "b", "", title);
  const text = element(turn, "span", "text");
  return (piece, drafted) => {
    const kind = drafted ? "drafted" : "own";
    // Joined with what stands before it where it can be: fewer elements, and text that reads as one.
    if (text.lastChild?.className === kind) text.lastChild.textContent += piece;
    else element(text, "span", kind, piece);
    log.scrollTop = log.scrollHeight;
  };
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

/** The last step that had drafts; `told` says whether the target tells of trees at all. */
function showTree(last, accepted, told) {
  if (last) drawTree(at("tree"), last.tree);
  else at("tree").replaceChildren();
  const drafted = accepted.some((count) => count > 0);
  const without = drafted && !told ? "the target's device chose the rows of each step, and tells no tree" : "no step had drafts";
  at("tree-text").textContent = last ? describeTree(last.tree, last.step) : without;
}

function fill(row, values) {
  [...at(row).querySelectorAll("td")].forEach((cell, place) => (cell.textContent = values[place]));
}

/** One answer, with drafts or without. Returns its text. */
async function run(speculation, parent, title, signal) {
  const say = place(parent, title);
  const accepted = [];
  const row = speculation ? "row-on" : "row-off";
  let text = "", tokens = 0, begun = 0, drawn = 0, last = null, told = false;
  const asked = {
    model: served.id,
    messages: conversation,
    max_tokens: at("tokens").valueAsNumber || 200,
    temperature: at("temperature").valueAsNumber || 0,
    outrider: { drafts: true, trees: speculation, speculation },
  };
  if (served.outrider.prediction && at("prediction").value) {
    asked.prediction = { type: "content", content: at("prediction").value };
  }
  for await (const event of answer(at("key").value, asked, signal)) {
    const { pieces = [], accepted_by_step = [], tokens: more = 0, totals, tree, step } = event.outrider ?? {};
    for (const piece of pieces) say(piece.text, piece.drafted);
    text += pieces.map((piece) => piece.text).join("");
    accepted.push(...accepted_by_step);
    told ||= Boolean(tree);
    if (tree?.tokens.length > 1) last = { tree, step };
    const now = performance.now();
    if (begun) tokens += more;
    begun ||= now;
    if (now - drawn > 100) {
      drawn = now;
      // The first events of an answer bring neither time nor steps.
      const rate = tokens && now > begun ? ((1000 * tokens) / (now - begun)).toFixed(1) : "…";
      const sum = accepted.reduce((sum, count) => sum + count, 0);
      fill(row, [rate, accepted.length ? (1 + sum / accepted.length).toFixed(2) : "…", accepted.length]);
      if (speculation) drawSteps(accepted);
      if (last) showTree(last, accepted, told);
    }
    if (totals) fill(row, [totals.tokens_per_second ?? "–", totals.mean_accepted_length.toFixed(2), totals.steps]);
  }
  if (speculation) {
    drawSteps(accepted);
    showTree(last, accepted, told);
  }
  return text;
}

async function answers(drafts, signal) {
  if (drafts !== "both") return run(drafts === "on", log, drafts === "on" ? "answer" : "answer, without drafts", signal);
  const pair = element(log, "div", "both");
  const drafted = await run(true, pair, "with drafts", signal);
  const plain = await run(false, pair, "without drafts", signal);
  at("compared").textContent = drafted === plain ? "Both said the same." : "The two differ, as they may above temperature 0.";
  return drafted;
}

async function turn(said) {
  fail(null);
  at("compared").textContent = "";
  conversation.push({ role: "user", content: said });
  const mine = element(log, "div", "turn");
  element(mine, "b", "", "you");
  element(mine, "span", "text", said);
  message.value = "";
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  try {
    const drafts = document.querySelector('input[name="drafts"]:checked').value;
    if (!served) await findModel();
    conversation.push({ role: "assistant", content: await answers(drafts, running.signal) });
  } catch (problem) {
    conversation.pop();
    for (const begun of log.querySelectorAll(".answer")) {
      if (!begun.querySelector(".text").textContent) begun.remove();
    }
    if (problem.name === "AbortError") element(log, "p", "ended", "ended by you");
    else fail(problem.message);
  } finally {
    running = null;
    send.disabled = false;
    stop.disabled = true;
    message.focus();
  }
}

async function findModel() {
  [served] = await models(at("key").value);
  const { drafter, prediction } = served.outrider;
  at("served").textContent = `${served.id}, ${drafter ? `drafter ${drafter}` : "no drafter"}`;
  at("prediction").disabled = !prediction;
  at("prediction-note").textContent = prediction ? "(becomes drafts)" : "(this server cannot use one)";
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && message.value.trim()) turn(message.value.trim());
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
stop.addEventListener("click", () => running?.abort());
at("forget").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  log.replaceChildren();
  fail(null);
});
at("key").addEventListener("change", () => findModel().then(() => fail(null), (problem) => fail(problem.message)));
findModel().catch((problem) => {
  at("served").textContent = "no model";
  fail(problem.message);
});
message.focus();
