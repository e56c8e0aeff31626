// The documents: listed, added by choosing or dropping files, deleted.
import { events, get, request } from "./api.js";
import { announce, at, button, el, plural } from "./dom.js";

let limits = { suffixes: [], max_bytes: Infinity };
let waiting = Promise.resolve(); // files are added one after another

let paths = new Map(); // of documents that have the title of another, by id

export let count = 0;
const NAMED = 3; // omissions to show at once
const FILTERED = 8; // documents from which a filter is shown

/** The omissions of a document, in a line; "" if there are none. */
export function leftOut(omissions) {
  const more = omissions.length > NAMED ? `; ${omissions.length - NAMED} more` : "";
  return omissions.length ? `left out: ${omissions.slice(0, NAMED).join("; ")}${more}` : "";
}

/** What a source's document is called in the list of documents. */
export const titleOf = ({ document, title }) => paths.get(document) || title || document;

/** List the documents. The lists of documents and of uploads have "change" events. */
export async function showDocuments() {
  const { data, suffixes, max_bytes } = await get("/v1/documents");
  limits = { suffixes, max_bytes };
  count = data.length;
  paths = new Map(data.map(({ id, path }) => [id, path]));
  at("files").accept = suffixes.join(",");
  at("kinds").textContent = kinds(suffixes);
  at("documents").replaceChildren(...data.map(item));
  at("filter").hidden = count < FILTERED;
  filter();
  at("documents").dispatchEvent(new Event("change"));
}

/** Hide the documents whose title lacks the filter's text. */
function filter() {
  const wanted = at("filter").hidden ? "" : at("filter").value.trim().toLowerCase();
  for (const row of at("documents").children) row.hidden = !row.querySelector(".name").title.toLowerCase().includes(wanted);
}

function kinds(suffixes) {
  const known = { ".md": "Markdown", ".html": "HTML", ".pdf": "PDF", ".docx": "Word", ".pptx": "PowerPoint", ".xlsx": "Excel", ".rtf": "RTF", ".ods": "OpenDocument sheets", ".epub": "EPUB" };
  const names = Object.entries(known).filter(([suffix]) => suffixes.includes(suffix)).map(([, name]) => name);
  const size = `${Math.floor(limits.max_bytes / 2 ** 20) || "less than 1"} MiB`;
  return `Text, code, tables, mail, ${names.join(", ")}; up to ${size} each.`;
}

function item(about) {
  const title = about.path ?? about.title;
  const name = el("a", { className: "name", title, href: `#${encodeURIComponent(title)}/${about.chunks[0]}` }, title);
  const row = el("li", {}, name, el("span", { className: "quiet small" }, plural(about.chunks.length, "chunk")));
  const omitted = omissions(about.omissions);
  if (about.object === "document") { // files were precomputed on the server's machine and are deleted there
    row.append(button("×", () => remove(about, row), { className: "plain", "aria-label": `Delete the document ${about.title}`, title: "Delete" }));
  }
  if (omitted) row.append(omitted);
  return row;
}

/** An element with all omissions of a document: a line, or a line that opens to show the rest. */
function omissions(all) {
  const line = leftOut(all), className = "omissions small";
  if (all.length <= NAMED) return line && el("p", { className }, line);
  return el("details", { className }, el("summary", {}, line), ...all.slice(NAMED).map((text) => el("p", {}, text)));
}

async function remove(about, row) {
  if (!confirm(`Delete the document "${about.title}" from the store?`)) return;
  try {
    await request("DELETE", `/v1/documents/${encodeURIComponent(about.id)}`);
  } catch (error) {
    row.append(el("span", { className: "error", role: "alert" }, error.message));
    return;
  }
  announce(`${about.title} deleted`);
  await showDocuments();
  at("choose").focus();
}

/** Add files, one after another; each has a line with its progress. */
export function addFiles(files) {
  at("uploads").dispatchEvent(new Event("change"));
  for (const file of files) {
    const bar = el("progress", { "aria-label": `Progress of ${file.name}` });
    const state = el("span", { className: "quiet small" }, "waiting");
    const stop = new AbortController();
    const cancel = button("×", () => stop.abort(), { className: "plain", "aria-label": `Cancel ${file.name}`, title: "Cancel" });
    const row = el("li", {}, el("span", { className: "name" }, file.name), state, cancel, bar);
    at("uploads").append(row);
    waiting = waiting.then(() => add(file, row, bar, state, stop.signal));
  }
  return waiting;
}

async function add(file, row, bar, state, signal) {
  try {
    signal.throwIfAborted();
    check(file);
    state.textContent = "reading";
    const response = await request("PUT", `/v1/documents/${encodeURIComponent(file.name)}`, { bytes: file, accept: "text/event-stream", signal });
    for await (const record of events(response)) {
      if (record.object === "document.progress") {
        bar.max = record.chunks;
        bar.value = record.stored;
        state.textContent = `${record.stored} of ${plural(record.chunks, "chunk")}`;
      } else {
        const stored = `${file.name}: ${plural(record.chunks.length, "chunk")} stored`;
        announce([stored, leftOut(record.omissions)].filter(Boolean).join("; "));
      }
    }
    row.remove();
    await showDocuments();
  } catch (error) {
    if (error.name === "AbortError") {
      row.remove();
      announce(`${file.name} cancelled`);
      return;
    }
    bar.remove();
    state.remove();
    row.append(el("span", { className: "error", role: "alert" }, error.message));
    const close = row.querySelector("button");
    close.setAttribute("aria-label", `Dismiss ${file.name}`);
    close.title = "Dismiss";
    close.addEventListener("click", () => row.remove());
  }
}

/** Throws an error for a file that the server would refuse, before it is sent. */
function check(file) {
  if (file.size > limits.max_bytes) throw new Error(`larger than ${Math.floor(limits.max_bytes / 2 ** 20)} MiB (serve --max-body)`);
  const suffix = file.name.match(/\.[^.]+$/)?.[0].toLowerCase();
  if (suffix && !limits.suffixes.includes(suffix)) throw new Error(`${suffix} files cannot be converted here`);
}

export function watchDocuments() {
  at("filter").addEventListener("input", filter);
  at("choose").addEventListener("click", () => at("files").click());
  at("files").addEventListener("change", () => {
    addFiles([...at("files").files]);
    at("files").value = "";
  });
  const holdsFiles = (event) => !at("app").hidden && event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    addFiles([...event.dataTransfer.files]);
  });
}
