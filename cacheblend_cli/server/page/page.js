"use strict";

const at = (id) => document.getElementById(id);
let asked = null; // the body of the last question, for Verify
let running = null; // an AbortController while an answer is made

function body() {
  const blend = { mode: at("mode").value };
  if (at("ratio").value !== "") blend.ratio = Number(at("ratio").value);
  return {
    messages: [{ role: "user", content: at("question").value }],
    search: { k: Number(at("k").value) || 5 },
    blend, explain: true, stream: true,
  };
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function fail(message, status) {
  at("error").textContent = message;
  at("error").hidden = false;
  if (status === 401) {
    at("key-label").hidden = false;
    at("key").focus();
  }
}

async function ask(request) {
  running = new AbortController();
  const begun = performance.now();
  let first = null;
  at("error").hidden = true;
  at("result").hidden = false;
  at("answer").textContent = "";
  for (const id of ["figures", "sources", "layers", "layers-said"]) at(id).replaceChildren();
  busy(true);
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request), signal: running.signal,
    });
    if (!response.ok) {
      at("result").hidden = true;
      fail((await response.json()).error.message, response.status);
      return;
    }
    for await (const event of events(response)) {
      if (event.error) { fail(event.error.message); return; }
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        first ??= performance.now() - begun;
        at("answer").append(piece);
      }
      if (event.blend) show(event.blend, first);
    }
    asked = request;
  } catch (error) {
    if (error.name !== "AbortError") fail(`The server cannot be reached: ${error.message}`);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(is) {
  at("send").disabled = is;
  at("stop").disabled = !is;
  at("verify").disabled = is || asked === null;
}

const ms = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;

function figure(name, value) {
  const box = document.createElement("div");
  const term = document.createElement("dt");
  const said = document.createElement("dd");
  term.textContent = name;
  said.textContent = value;
  box.append(term, said);
  at("figures").append(box);
}

function show(blend, first) {
  figure("First token", ms(blend.timing.ttft_s));
  if (first !== null) figure("First token, seen here", `${first.toFixed(0)} ms`);
  figure("Prompt", `${blend.prompt_tokens} tokens`);
  figure("From the store", `${blend.cached_tokens} tokens`);
  figure("Computed again", `${blend.recomputed_tokens} tokens`);
  if (blend.hot_tokens) figure("Still in the pool", `${blend.hot_tokens} tokens`);
  if (blend.verify) {
    const v = blend.verify;
    figure("Full prefill, measured", ms(v.full_ttft_s));
    figure("KL to it", v.kl.toPrecision(3));
    figure("Its answer's tokens", `${Math.round(v.answer_top1 * v.answer_tokens)} of ${v.answer_tokens} agree`);
  }
  layers(blend);
  blend.chunks.forEach((chunk, i) => source(chunk, i));
}

function layers(blend) {
  const rows = blend.layers.map((layer) => layer.rows);
  const most = Math.max(...rows), least = Math.min(...rows);
  at("layers-said").textContent =
    `${rows.length} layers compute ${least === most ? most : `${least} to ${most}`} of ${blend.prompt_tokens} rows.`;
  for (const layer of blend.layers) {
    const bar = document.createElement("span");
    bar.className = layer.status;
    bar.style.height = `${Math.max(3, (100 * layer.rows) / blend.prompt_tokens)}%`;
    bar.title = `layer ${layer.layer}: ${layer.rows} rows, ${layer.fresh} of them computed again (${layer.status})`;
    at("layers").append(bar);
  }
}

function source(chunk, i) {
  const item = document.createElement("li");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  const badge = document.createElement("span");
  const text = document.createElement("p");
  details.open = i === 0;
  badge.className = `badge ${chunk.status}`;
  badge.textContent = chunk.status;
  summary.append(`${chunk.title || chunk.document} `, badge, ` ${chunk.recomputed} of ${chunk.tokens} tokens computed`);
  text.className = "text";
  for (const [piece, how] of chunk.pieces) {
    const span = document.createElement("span");
    span.className = how;
    span.title = how;
    span.textContent = piece;
    text.append(span);
  }
  details.append(summary, text);
  item.append(details);
  at("sources").append(item);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && at("question").value.trim()) ask(body());
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("verify").addEventListener("click", () => ask({ ...asked, verify: true }));
