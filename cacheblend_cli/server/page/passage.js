// The dialog that shows a source in its document, at its place, with every token tinted by how its KV was made.
import { get } from "./api.js";
import { leftOut, titleOf } from "./documents.js";
import { at, el, plural } from "./dom.js";

let sources = [];
let shown = 0;
let request = 0; // the latest one: an earlier document may come later

export function watchPassage() {
  at("passage-close").addEventListener("click", () => at("passage").close());
  at("documents").addEventListener("click", (event) => {
    if (event.target.hash && event.target.hash === location.hash) openLinked(); // which changes no hash
  });
  at("passage-previous").addEventListener("click", () => show(shown - 1));
  at("passage-next").addEventListener("click", () => show(shown + 1));
  at("passage").addEventListener("click", (event) => {
    if (event.target === at("passage")) at("passage").close(); // the backdrop
  });
}

/** chunks: an answer's, in the order of its sources. */
export function openPassage(chunks, index) {
  sources = chunks;
  at("passage").showModal();
  return show(index);
}

function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name; // not made by this server
  }
}

/** Open the passage that the address names, as the annotations of answers do: #TITLE/CHUNK */
export async function openLinked() {
  const [, name, id] = location.hash.match(/^#(.*)\/([0-9a-f]+)#?$/) ?? []; // Open WebUI appends #:~:text=
  if (!id) return;
  let chunk;
  try {
    chunk = await get(`/v1/chunks/${id}`);
  } catch (error) {
    if (error.status === 401) return;
    chunk = { id, title: error.message, text: "It was removed from the store, or belongs to another API key." };
  }
  openPassage([{ ...chunk, title: chunk.title || decoded(name), pieces: [[chunk.text, ""]] }], 0);
}

async function show(index) {
  const own = ++request;
  shown = index;
  const chunk = sources[index];
  at("passage-title").textContent = `${index + 1}. ${titleOf(chunk)}`;
  at("passage-about").textContent = [
    chunk.place,
    ...(chunk.status ? [plural(chunk.tokens, "token"), `${chunk.recomputed} computed for this answer`, chunk.status] : []),
  ].filter(Boolean).join(" · ");
  at("passage").querySelector(".legend").hidden = !chunk.status; // no answer's: a link to the passage
  at("passage-previous").disabled = index === 0;
  at("passage-next").disabled = index === sources.length - 1;
  lay([passage(chunk, true)]); // the passage at once, the rest of its document when it is there
  let read;
  try {
    read = await get(`/v1/documents/${encodeURIComponent(chunk.document)}`);
  } catch {
    return; // a document that came with the question, or was deleted since
  }
  if (own !== request) return;
  if (read.omissions.length) at("passage-about").append(` · ${leftOut(read.omissions)}`);
  const used = new Map(sources.map((source) => [source.id, source]));
  if (!read.chunks.some(({ id }) => id === chunk.id)) return; // it says something else by now
  lay(read.chunks.map((part) => (used.has(part.id) ? passage(used.get(part.id), part.id === chunk.id) : el("div", {}, part.text))));
}

function passage(chunk, isCurrent) {
  const part = el("div", { className: isCurrent ? "passage current" : "passage" });
  for (const [text, how] of chunk.pieces) part.append(el("span", { className: how, title: how }, text));
  return part;
}

function lay(parts) {
  at("passage-text").replaceChildren(...parts);
  const current = at("passage-text").querySelector(".current");
  at("passage-text").scrollTop = current.offsetTop - at("passage-text").offsetTop - 8;
}
