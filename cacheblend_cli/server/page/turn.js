// A turn of the conversation: the question, the answer, its sources as footnotes, and how it was computed.
import { fillComparison, showComparing } from "./comparison.js";
import { titleOf } from "./documents.js";
import { announce, button, copy, el, plural, seconds } from "./dom.js";
import { openPassage } from "./passage.js";

/** The element of a turn. actions: regenerate, compare and withoutDocuments of the last turn, null for earlier turns. */
export function showTurn(turn, actions) {
  const article = el("article", { className: "turn" });
  article.append(el("p", { className: "question" }, el("span", { className: "hidden" }, "You: "), turn.question));
  const answer = el("div", { className: "answer" }, el("h2", { className: "hidden" }, "Answer"));
  if (turn.reasoning) answer.append(el("details", {}, el("summary", {}, "Reasoning"), el("p", { className: "quiet said" }, turn.reasoning)));
  answer.append(said(turn));
  if (turn.stopped) answer.append(el("p", { className: "quiet small" }, "Stopped."));
  if (turn.error) answer.append(failure(turn.error, actions));
  const missing = turn.blend?.claims?.filter((claim) => !claim.found) ?? [];
  if (missing.length) answer.append(el("p", { className: "quiet small note" }, `Not in the sources: ${[...new Set(missing.map(({ text }) => text))].join(", ")}`));
  for (const note of turn.blend?.notes ?? []) answer.append(el("p", { className: "quiet small note" }, note));
  if (turn.blend?.chunks.length) answer.append(footnotes(turn.blend));
  answer.append(tools(turn, actions));
  if (turn.full) answer.append(fillComparison(showComparing(), turn));
  if (turn.blend) answer.append(computation(turn.blend));
  article.append(answer);
  return article;
}

/** The element of a turn that is being answered, and what adds text to it. */
export function showRunning(question) {
  const said = el("p", { className: "said" });
  const reasoning = el("p", { className: "quiet said" });
  const article = el("article", { className: "turn running", "aria-busy": "true" },
    el("p", { className: "question" }, el("span", { className: "hidden" }, "You: "), question),
    el("div", { className: "answer" }, reasoning, said));
  return { article, add: (text) => said.append(text), think: (text) => reasoning.append(text) };
}

/** The answer's text. What was found in a source opens it, what is in none is underlined. */
function said(turn) {
  const letters = Array.from(turn.answer); // claims count code points
  const { chunks, claims } = turn.blend ?? { chunks: [], claims: [] };
  const sources = byRank(chunks);
  const text = el("p", { className: "said" });
  let at = 0;
  for (const claim of claims ?? []) {
    if (letters.slice(claim.start, claim.end).join("") !== claim.text) continue; // the answer was changed since
    text.append(letters.slice(at, claim.start).join(""), shownClaim(claim, sources, sources.indexOf(chunks[claim.chunk])));
    at = claim.end;
  }
  text.append(letters.slice(at).join(""));
  return text;
}

function shownClaim(claim, sources, index) {
  if (!claim.found) return el("span", { className: "claim missing", title: "not in the sources" }, claim.text);
  if (index < 0) return claim.text; // the question says it
  const place = [titleOf(sources[index]), claim.place].filter(Boolean).join(", ");
  return button(claim.text, () => openPassage(sources, index), { className: "claim", "aria-haspopup": "dialog", title: place });
}

/** Chunks, best first as in the terminal: found ones by rank, then others in the prompt's order. */
const byRank = (chunks) => chunks.toSorted((a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity) || 0);

function failure(error, actions) {
  const box = el("div", { className: "error", role: "alert" }, el("p", {}, error.message));
  if (error.code === "context_length_exceeded") box.append(el("p", {}, "Start a new conversation, or set fewer chunks."));
  if (error.code === "nothing_found" && actions) box.append(button("Answer without documents", actions.withoutDocuments));
  return box;
}

/** The sources. */
function footnotes(blend) {
  const list = el("ol", { className: "footnotes", "aria-label": "Sources" });
  const chunks = byRank(blend.chunks);
  chunks.forEach((chunk, i) => {
    const name = titleOf(chunk);
    const place = chunk.place ? `, ${chunk.place}` : "";
    list.append(el("li", {}, button("", () => openPassage(chunks, i), {
      className: "footnote", "aria-haspopup": "dialog", "aria-label": `Source ${i + 1}: ${name}${place}, ${chunk.status}`,
      title: `${plural(chunk.tokens, "token")}, ${chunk.recomputed} of them computed for this answer`,
    })));
    list.lastChild.firstChild.append(
      el("b", {}, `${i + 1}`), el("span", { className: "name" }, `${name}${place}`), el("span", { className: `badge ${chunk.status}` }, chunk.status),
    );
  });
  return list;
}

function tools(turn, actions) {
  const row = el("div", { className: "tools" });
  if (turn.answer) {
    row.append(button("Copy", async (event) => {
      await copy(turn.answer);
      event.target.textContent = "Copied";
      announce("Copied");
      event.target.addEventListener("blur", () => { event.target.textContent = "Copy"; }, { once: true });
    }));
  }
  if (actions) row.append(button("Regenerate", actions.regenerate, { className: "regenerate" }));
  if (actions && turn.asked && turn.blend?.cached_tokens && turn.blend.mode !== "full" && !turn.full) {
    row.append(button("Compare with full prefill", actions.compare, { className: "compare" }));
  }
  return row;
}

function computation(blend) {
  const details = el("details", { className: "how" }, el("summary", {}, summary(blend)));
  const figures = el("dl", { className: "figures" });
  const figure = (name, value) => figures.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  figure("First token", seconds(blend.timing.ttft_s));
  if (blend.seen_ms) figure("First token, seen here", seconds(blend.seen_ms / 1000));
  figure("Decoding", `${blend.timing.decode_tokens_per_s.toFixed(1)} tokens/s`);
  figure("Prompt", plural(blend.prompt_tokens, "token"));
  figure("From the store", plural(blend.cached_tokens, "token"));
  figure("Recomputed", plural(blend.recomputed_tokens, "token"));
  if (blend.prefix_cache_tokens) figure("Still in the pool", plural(blend.prefix_cache_tokens, "token"));
  figure("Mode", blend.mode === "blend" ? `blend at ${blend.ratio}` : blend.mode);
  details.append(figures);
  return details;
}

function summary(blend) {
  const reused = blend.cached_tokens ? `, ${blend.cached_tokens} of ${blend.prompt_tokens} tokens from the store` : "";
  return `First token after ${seconds(blend.timing.ttft_s)}${reused}`;
}
