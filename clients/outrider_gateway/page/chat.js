// The chat page: what is typed, what is asked of the server, and what is shown of its answers.

import { Conversation } from "./conversation.js";
import { at, element } from "./elements.js";
import { AnswerFigures } from "./figures.js";
import { answer, models, StillLoading } from "./stream.js";
import { AnswerTurn, showQuestion } from "./turns.js";

const AT_THE_END = 40; // pixels above the end of the log that count as the end
const DELETED = Symbol("deleted"); // why an answer is aborted whose conversation is gone
const STOPPED = "stopped by you";
const KEPT = ["system", "tools", "tokens", "temperature"]; // settings that are kept over a reload
const [log, error, message, send, stop] = ["log", "error", "message", "send", "stop"].map(at);
const conversation = new Conversation();
let served = []; // the models that the server offers
let running = null; // what aborts the answer that is being written
let growing = null; // that answer
let edited = null; // index of the message that is being edited
let follows = true; // whether the log shows its end

function fail(problem) {
  error.hidden = !problem;
  error.textContent = problem ?? "";
}

const settings = () => Object.fromEntries(KEPT.map((id) => [id, at(id).value]));
/** Keeps the conversation, with what an answer has so far. */
const keep = () => conversation.keep(settings(), growing?.some && growing.message);
const model = () => served.find(({ id }) => id === at("model").value) ?? served[0];

// --- the log

function scroll() {
  if (follows) log.scrollTop = log.scrollHeight;
  at("newest").hidden = follows;
}

log.addEventListener("scroll", () => {
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < AT_THE_END;
  at("newest").hidden = follows;
});
at("newest").addEventListener("click", () => {
  follows = true;
  scroll();
});
new MutationObserver(scroll).observe(log, { childList: true, subtree: true, characterData: true });

/** Shows the whole conversation anew. */
function show() {
  log.replaceChildren();
  conversation.messages.forEach((said, index) => {
    if (said.role === "user") return showQuestion(log, said.content, () => edit(index));
    const turn = new AnswerTurn(log, "answer", () => regenerate(index));
    turn.addMessage(said);
    turn.end(said.stopped && STOPPED);
  });
}

// --- asking

/** The tools of the settings; undefined for none. Throws for what is no JSON. */
function readTools() {
  const text = at("tools").value.trim();
  try {
    return text ? JSON.parse(text) : undefined;
  } catch (problem) {
    throw new Error(`the tools are no JSON: ${problem.message}`);
  }
}

/** One answer, with drafts or without, shown in `parent`. */
async function stream(speculation, parent, title, again) {
  const turn = new AnswerTurn(parent, title, again);
  growing ??= turn;
  const figures = new AnswerFigures(speculation);
  const { id, outrider } = model();
  const tools = readTools();
  const asked = {
    model: id,
    messages: conversation.request(at("system").value.trim()),
    max_tokens: at("tokens").valueAsNumber || 1024,
    temperature: at("temperature").valueAsNumber || 0,
    outrider: { drafts: true, trees: speculation, speculation },
    ...(tools && { tools }),
  };
  if (outrider.prediction && at("prediction").value) {
    asked.prediction = { type: "content", content: at("prediction").value };
  }
  try {
    for await (const event of answer(at("key").value, asked, running.signal)) {
      turn.add(event.choices?.[0]?.delta ?? {}, event.outrider?.pieces);
      figures.add(event.outrider);
    }
    turn.end();
  } catch (problem) {
    if (turn.some) turn.end(problem.name === "AbortError" ? STOPPED : "broken off");
    else turn.remove();
    throw problem;
  } finally {
    figures.end();
  }
  return turn.message;
}

/** The answer to the conversation as it stands. */
async function answers() {
  const drafts = document.querySelector('input[name="drafts"]:checked').value;
  const index = conversation.messages.length;
  const again = () => regenerate(index);
  if (drafts !== "both") return stream(drafts === "on", log, drafts === "on" ? "answer" : "answer, without drafts", again);
  const pair = element(log, "div", "both");
  const drafted = await stream(true, pair, "with drafts", again);
  const plain = await stream(false, pair, "without drafts", again);
  at("compared").textContent = drafted.content === plain.content ? "Both answers are the same." : "The answers differ, as they may above temperature 0.";
  return drafted;
}

/** Answers the last message of the reader. If nothing came, the message goes back into the box. */
async function respond() {
  fail(null);
  at("compared").textContent = "";
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  follows = true;
  const { signal } = running;
  try {
    if (!served.length) await findModels();
    const said = await answers();
    if (signal.reason !== DELETED) conversation.messages.push(said);
  } catch (problem) {
    // Some browsers do not pass the reason on.
    if (signal.reason === DELETED) return;
    if (growing?.some) conversation.messages.push({ ...growing.message, stopped: true });
    else giveBack();
    if (problem.name !== "AbortError") fail(problem.message);
  } finally {
    running = growing = null;
    send.disabled = false;
    stop.disabled = true;
    keep();
    message.focus();
  }
}

/** Takes the last message back out of the conversation, into the box unless something else was typed there. */
function giveBack() {
  const { content } = conversation.messages.pop();
  if (!message.value) message.value = content;
  // Not the log anew: what stands before knows by whom its tokens were made.
  for (const empty of log.querySelectorAll(".both:empty")) empty.remove();
  log.lastElementChild.remove();
}

function ask(content) {
  if (edited !== null) {
    conversation.cut(edited);
    leaveEditing();
    show();
  }
  conversation.messages.push({ role: "user", content });
  const index = conversation.messages.length - 1;
  showQuestion(log, content, () => edit(index));
  message.value = "";
  keep();
  respond();
}

/** Answers anew what the answer at `index` answered; what follows it goes. */
function regenerate(index) {
  if (running) return;
  leaveEditing();
  conversation.cut(index);
  show();
  respond();
}

function edit(index) {
  if (running) return;
  edited = index;
  at("editing").hidden = false;
  message.value = conversation.messages[index].content;
  message.focus();
}

function leaveEditing() {
  edited = null;
  at("editing").hidden = true;
}

// --- models

async function findModels() {
  served = await models(at("key").value);
  const chosen = at("model").value;
  at("model").replaceChildren(...served.map(({ id }) => new Option(id, id, false, id === chosen)));
  at("model").disabled = served.length < 2;
  describeModel();
}

function describeModel() {
  const { outrider, max_model_len: longest } = model();
  const { drafter, prediction } = outrider;
  at("served").textContent = drafter ? `drafter ${drafter}` : "no drafter";
  at("tokens").max = longest;
  at("prediction").disabled = !prediction;
  at("prediction-note").textContent = prediction ? "(becomes drafts)" : "(this server cannot use one)";
}

/** Finds the models, and asks again while the server says that one is being loaded. */
function look() {
  findModels().then(
    () => fail(null),
    (problem) => {
      at("served").textContent = problem instanceof StillLoading ? problem.message : "no model";
      if (problem instanceof StillLoading) setTimeout(look, 1000 * problem.seconds);
      else fail(problem.message);
    },
  );
}

// --- what the reader does

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && message.value.trim()) ask(message.value.trim());
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) return running.abort();
  if (edited !== null) message.value = "";
  leaveEditing();
});
stop.addEventListener("click", () => running?.abort());
at("delete").addEventListener("click", () => {
  running?.abort(DELETED);
  leaveEditing();
  conversation.cut(0);
  keep();
  show();
  fail(null);
});
at("drafts-view").addEventListener("click", () => {
  const shown = document.body.classList.toggle("with-drafts");
  at("drafts-view").setAttribute("aria-pressed", shown);
  at("drafts-view").textContent = shown ? "Hide drafts" : "Show drafts";
  at("figures").hidden = !shown;
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings-view").addEventListener("click", () => {
  const hidden = (at("settings").hidden = !at("settings").hidden);
  at("settings-view").setAttribute("aria-expanded", !hidden);
});
for (const id of KEPT) at(id).addEventListener("change", keep);
at("model").addEventListener("change", describeModel);
at("key").addEventListener("change", look);
addEventListener("pagehide", keep);

for (const [id, value] of Object.entries(conversation.settings)) if (KEPT.includes(id)) at(id).value = value;
show();
look();
message.focus();
