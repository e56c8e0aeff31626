// The page: asks over stored documents and shows what each answer rests on.
import { events, get, hasKey, keySpace, request, setKey, whenUnauthorized } from "./api.js";
import { fillComparison, showComparing } from "./comparison.js";
import * as conversations from "./conversations.js";
import { addFiles, count, showDocuments, watchDocuments } from "./documents.js";
import { announce, at, button, el, plural } from "./dom.js";
import { openLinked, watchPassage } from "./passage.js";
import { checkSettings, chosen, openSettings, showSettings, watchSettings, watchTheme } from "./settings.js";
import { showRunning, showTurn } from "./turn.js";

let current = conversations.create();
let running = null; // an AbortController while an answer is made

async function start() {
  let model;
  try {
    model = (await get("/v1/models")).data[0];
  } catch (error) {
    if (error.status !== 401) lock(error.message, error.status);
    return;
  }
  conversations.useSpace(await keySpace());
  at("model").textContent = model.id;
  at("model-about").textContent = `Model: ${model.id}, context of ${model.max_model_len} tokens. Fields left empty take the server's defaults.`;
  showSettings(model.defaults);
  at("locked").hidden = true;
  for (const id of ["app", "menu", "show-settings"]) at(id).hidden = false;
  at("forget-key").hidden = !hasKey();
  open(conversations.create());
  await showDocuments();
  await openLinked();
}

/** Show nothing but the form for the key. */
function lock(message, status = 401) {
  for (const id of ["app", "menu", "show-settings"]) at(id).hidden = true;
  for (const id of ["thread", "conversations", "documents", "model"]) at(id).replaceChildren();
  at("locked").hidden = false;
  at("key-error").hidden = status === 401 && !hasKey(); // nothing was wrong yet
  at("key-error").textContent = message;
  if (status === 401) setKey("");
  at("key").value = "";
  at("key").focus();
}

function open(conversation) {
  running?.abort();
  running = null;
  busy(false);
  current = conversation;
  showThread();
  listConversations();
  openSide(false);
  at("question").focus();
}

function showThread() {
  const last = current.turns.length - 1;
  const actions = { regenerate: () => again({}), compare, withoutDocuments: () => again({ search: false }) };
  const turns = current.turns.map((turn, i) => showTurn(turn, i === last ? actions : null));
  at("thread").replaceChildren(...turns, at("empty") ?? el("div", { id: "empty", className: "quiet" }));
  showEmpty();
  at("thread").scrollTop = at("thread").scrollHeight;
}

function showEmpty() {
  at("empty").hidden = current.turns.length > 0 || running !== null;
  at("empty").replaceChildren(...(count
    ? [`Ask a question about ${plural(count, "document")}. Each answer names its sources.`]
    : ["No documents are stored yet. Drop files on this page, then ask.", button("Add files", () => at("choose").click())]));
}

function listConversations() {
  const kept = conversations.all();
  at("conversations").replaceChildren(...kept.map((conversation) => el("li", {},
    button(conversation.title, () => open(conversation), {
      className: "name plain", title: conversation.title, "aria-current": `${conversation.id === current.id}`,
    }),
    button("×", () => {
      conversations.remove(conversation.id);
      if (conversation.id === current.id) open(conversations.create());
      else {
        listConversations();
        at("new").focus();
      }
    }, { className: "plain", "aria-label": `Delete the conversation ${conversation.title}`, title: "Delete" }))));
  at("clear").hidden = !kept.length;
}

/** Ask a new question, behind the turns before it. */
async function ask(question, more) {
  const conversation = current;
  // a seed, so that a comparison draws alike where the temperature is not 0
  const asked = { ...chosen(), seed: Math.floor(Math.random() * 2 ** 31), ...more };
  const turn = { question, asked, answer: "", reasoning: "" };
  const shown = showRunning(question);
  at("empty").hidden = true;
  at("thread").append(shown.article);
  at("thread").scrollTop = at("thread").scrollHeight;
  announce("Answering");
  await generate(turn, messages(conversation.turns, question), asked, shown);
  if (turn.error?.code === "invalid_api_key") return;
  conversation.turns.push(turn);
  at("storage-full").hidden = conversations.save(conversation);
  announce(turn.stopped ? "Stopped" : turn.error ? "" : `Answer: ${turn.answer}`);
  if (conversation === current) showThread();
  listConversations();
}

/** The messages of a conversation up to a question. */
function messages(turns, question) {
  const before = turns.filter((turn) => turn.answer).flatMap((turn) => [
    { role: "user", content: turn.question }, { role: "assistant", content: turn.answer },
  ]);
  return [...before, { role: "user", content: question }];
}

/** Have an answer generated, into a turn's answer, reasoning and blend, or error, or stopped. shown: adds text to the page. */
async function generate(turn, messages, asked, shown) {
  const own = running = new AbortController();
  busy(true);
  const begun = performance.now();
  let first = null;
  try {
    const json = { messages, ...asked, explain: true, stream: true };
    const response = await request("POST", "/v1/chat/completions", { json, signal: own.signal });
    for await (const { choices, blend } of events(response)) {
      const { content, reasoning_content: thought } = choices[0]?.delta ?? {};
      if (content || thought) first ??= Math.round(performance.now() - begun);
      const atEnd = at("thread").scrollHeight - at("thread").scrollTop - at("thread").clientHeight < 40;
      if (content) { turn.answer += content; shown.add(content); }
      if (thought) { turn.reasoning += thought; shown.think(thought); }
      if (atEnd) at("thread").scrollTop = at("thread").scrollHeight;
      if (blend) turn.blend = { ...blend, seen_ms: first };
    }
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = { message: error.message, code: error.code };
  }
  if (running === own) {
    running = null;
    busy(false);
  }
}

/** Have the last question answered by a full prefill too, and show that answer below the first. */
async function compare() {
  if (running) return;
  const conversation = current;
  const turn = conversation.turns.at(-1);
  const article = at("thread").querySelector("article:last-of-type");
  const pressed = article.querySelector(".compare");
  const section = showComparing();
  article.querySelector(".comparison")?.remove(); // one that failed
  article.querySelector(".tools").after(section);
  section.focus();
  const full = { answer: "", reasoning: "" };
  const asked = { ...turn.asked, blend: { mode: "full" } };
  await generate(full, messages(conversation.turns.slice(0, -1), turn.question), asked, { add() {}, think() {} });
  if (full.stopped) {
    section.remove();
    if (conversation === current) pressed.focus();
  } else if (full.error) {
    section.append(el("p", { className: "error", role: "alert" }, full.error.message));
    section.querySelector(".verdict").textContent = "";
  } else {
    const { chunks, timing, prompt_tokens, prefix_cache_tokens } = full.blend;
    turn.full = { answer: full.answer, blend: { chunks: chunks.map(({ id }) => ({ id })), timing, prompt_tokens, prefix_cache_tokens } };
    pressed.remove();
    fillComparison(section, turn);
    section.scrollIntoView({ block: "nearest" });
    at("storage-full").hidden = conversations.save(conversation);
  }
}

/** Ask the last question again, with the settings of now. */
function again(more) {
  if (running || !checkSettings()) return;
  const { question } = current.turns.pop();
  at("thread").querySelector("article:last-of-type").remove();
  at("question").focus();
  ask(question, more);
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  for (const old of at("thread").querySelectorAll(".regenerate, .compare")) old.disabled = is;
}

function send() {
  const question = at("question").value.trim();
  if (running || !question || !checkSettings()) return;
  at("question").value = "";
  at("question").style.height = "";
  openSettings(false);
  at("question").focus();
  ask(question, {});
}

function openSide(is) {
  at("side").classList.toggle("open", is);
  at("menu").setAttribute("aria-expanded", `${is}`);
  at("chat").inert = is;
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  start();
});
at("forget-key").addEventListener("click", () => { setKey(""); running?.abort(); start(); });
at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("question").addEventListener("input", () => {
  at("question").style.height = "";
  at("question").style.height = `${Math.min(at("question").scrollHeight + 2, innerHeight * 0.4)}px`;
});
at("question").addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  addFiles(files);
});
at("stop").addEventListener("click", () => { running?.abort(); at("question").focus(); });
at("new").addEventListener("click", () => open(conversations.create()));
at("clear").addEventListener("click", () => {
  if (!confirm("Delete all conversations from this browser?")) return;
  conversations.removeAll();
  open(conversations.create());
});
at("menu").addEventListener("click", () => {
  openSide(!at("side").classList.contains("open"));
  if (at("side").classList.contains("open")) at("new").focus();
});
at("show-help").addEventListener("click", () => at("help").showModal());
at("help-close").addEventListener("click", () => at("help").close());
at("uploads").addEventListener("change", () => { if (at("menu").checkVisibility()) openSide(true); });
matchMedia("(max-width: 48rem)").addEventListener("change", () => openSide(false));
at("documents").addEventListener("change", () => { if (at("empty")) showEmpty(); });
addEventListener("hashchange", openLinked);
addEventListener("keydown", (event) => {
  const control = event.ctrlKey || event.metaKey;
  if (at("app").hidden || at("passage").open || at("help").open) return;
  if (event.key === "Escape") {
    if (event.shiftKey) at("question").focus();
    else if (at("side").classList.contains("open")) { openSide(false); at("menu").focus(); }
    else if (running) running.abort();
    else if (!at("settings").hidden) { openSettings(false); at("show-settings").focus(); }
  } else if (control && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    open(conversations.create());
  } else if (control && event.key === "/") {
    event.preventDefault();
    at("help").showModal();
  }
});
conversations.whenChanged(listConversations);
whenUnauthorized(lock);
watchTheme();
watchSettings();
watchPassage();
watchDocuments();
start();
