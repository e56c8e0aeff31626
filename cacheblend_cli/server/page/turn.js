// A turn of the conversation: the question, the answer, its sources as footnotes, and how it was computed.
import { announce, button, copy, el, plural } from "./dom.js";
import { openPassage } from "./passage.js";

const ms = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;

/** The element of a turn. actions: regenerate, verify and withoutDocuments of the last turn, null for earlier turns. */
export function showTurn(turn, actions) {
  const article = el("article", { className: "turn" });
  article.append(el("p", { className: "question" }, el("span", { className: "hidden" }, "You: "), turn.question));
  const answer = el("div", { className: "answer" }, el("h2", { className: "hidden" }, "Answer"));
  if (turn.reasoning) answer.append(el("details", {}, el("summary", {}, "Reasoning"), el("p", { className: "quiet said" }, turn.reasoning)));
  answer.append(el("p", { className: "said" }, turn.answer));
  if (turn.stopped) answer.append(el("p", { className: "quiet small" }, "Stopped."));
  if (turn.error) answer.append(failure(turn.error, actions));
  for (const note of turn.blend?.notes ?? []) answer.append(el("p", { className: "quiet small note" }, note));
  if (turn.blend?.chunks.length) answer.append(footnotes(turn.blend));
  answer.append(tools(turn, actions));
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

function failure(error, actions) {
  const box = el("div", { className: "error", role: "alert" }, el("p", {}, error.message));
  if (error.code === "context_length_exceeded") box.append(el("p", {}, "Start a new conversation, or set fewer chunks."));
  if (error.code === "nothing_found" && actions) box.append(button("Answer without documents", actions.withoutDocuments));
  return box;
}

function footnotes(blend) {
  const list = el("ol", { className: "footnotes", "aria-label": "Sources" });
  blend.chunks.forEach((chunk, i) => {
    const name = chunk.title || chunk.document;
    const place = chunk.place ? `, ${chunk.place}` : "";
    list.append(el("li", {}, button("", () => openPassage(blend.chunks, i), {
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
  if (actions && turn.blend?.chunks.length && !turn.blend.verify) {
    row.append(button("Compare with full prefill", actions.verify, { className: "verify" }));
  }
  return row;
}

function computation(blend) {
  const details = el("details", { className: "how", open: Boolean(blend.verify) }, el("summary", {}, summary(blend)));
  const figures = el("dl", { className: "figures" });
  const figure = (name, value) => figures.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  figure("First token", ms(blend.timing.ttft_s));
  if (blend.seen_ms) figure("First token, seen here", `${blend.seen_ms} ms`);
  figure("Decoding", `${blend.timing.decode_tokens_per_s.toFixed(1)} tokens/s`);
  figure("Prompt", plural(blend.prompt_tokens, "token"));
  figure("From the store", plural(blend.cached_tokens, "token"));
  figure("Recomputed", plural(blend.recomputed_tokens, "token"));
  if (blend.prefix_cache_tokens) figure("Still in the pool", plural(blend.prefix_cache_tokens, "token"));
  figure("Mode", blend.mode === "blend" ? `blend at ${blend.ratio}` : blend.mode);
  if (blend.verify) {
    const { full_ttft_s, kl, answer_top1, answer_tokens } = blend.verify;
    figure("Full prefill, first token", ms(full_ttft_s));
    figure("KL to full prefill", kl.toPrecision(3));
    figure("Same most likely token", `${Math.round(answer_top1 * answer_tokens)} of ${answer_tokens}`);
  }
  details.append(figures);
  if (blend.layers?.length) details.append(...layers(blend));
  return details;
}

function summary(blend) {
  const reused = blend.cached_tokens ? `, ${blend.cached_tokens} of ${blend.prompt_tokens} tokens from the store` : "";
  return `First token after ${ms(blend.timing.ttft_s)}${reused}`;
}

/** A bar for each layer: how many of the prompt's rows it computed. */
function layers(blend) {
  const rows = blend.layers.map((layer) => layer.rows);
  const [least, most] = [Math.min(...rows), Math.max(...rows)];
  const text = `${plural(rows.length, "layer")}, each computing ${least === most ? most : `${least} to ${most}`} of ${blend.prompt_tokens} rows`;
  const strip = el("div", { className: "layers", role: "img", "aria-label": text });
  for (const { layer, rows: own, fresh, status } of blend.layers) {
    const bar = el("span", { className: status, title: `layer ${layer}: ${own} rows, ${fresh} of them recomputed (${status})` });
    bar.style.height = `${Math.max(3, (100 * own) / blend.prompt_tokens)}%`;
    strip.append(bar);
  }
  return [el("p", { className: "quiet small" }, `${text}:`), strip];
}
