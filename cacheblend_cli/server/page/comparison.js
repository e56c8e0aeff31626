// The comparison of an answer with a full prefill's: the sentence, both first-token times, both texts from where they differ.
import { el, seconds } from "./dom.js";

/** The first word at which two texts differ, by number from 1, and each text before it and from it on. null: the same words. */
export function difference(...texts) {
  const [a, b] = texts.map((text) => text.match(/\S+\s*/g) ?? []);
  let same = 0;
  while (same < Math.min(a.length, b.length) && a[same].trim() === b[same].trim()) same += 1;
  if (same === a.length && same === b.length) return null;
  return { word: same + 1, parts: [a, b].map((words) => [words.slice(0, same).join(""), words.slice(same).join("").trim()]) };
}

/** The element of a comparison that is being made. The sentence is a live region: it changes in place when the answer is there. */
export function showComparing() {
  const sentence = el("p", { className: "verdict", role: "status" }, "Computing the answer by a full prefill. Esc stops.");
  return el("section", { className: "comparison", tabIndex: -1, "aria-label": "Comparison with a full prefill" }, sentence);
}

/** Fill the element with the turn's comparison. */
export function fillComparison(section, { answer, blend, full }) {
  const found = difference(answer, full.answer);
  const name = blend.mode === "reuse" ? "reused" : "blended";
  section.querySelector(".verdict").textContent = found
    ? `The full prefill's answer differs from word ${found.word} on.` : "The full prefill gives the same answer.";
  section.append(el("p", { className: "quiet small" },
    `First token: ${name} ${seconds(blend.timing.ttft_s)}, full prefill ${seconds(full.blend.timing.ttft_s)}`));
  const notes = [
    inMemory(`${name} answer`, blend), inMemory("full prefill", full.blend),
    `${ids(blend)}` === `${ids(full.blend)}` ? "" : "The documents have changed meanwhile: the two answers have different sources.",
  ].filter(Boolean);
  section.append(...notes.map((note) => el("p", { className: "quiet small note" }, note)));
  if (!found) return section;
  const names = [blend.mode === "reuse" ? "Reused KV" : "Blended KV", "Full prefill"];
  section.append(el("div", { className: "pair" }, ...found.parts.map(([before, rest], i) => el("div", {},
    el("h3", {}, names[i]), el("p", { className: "said" }, before, el("mark", {}, rest || "(ends here)"))))));
  return section;
}

const ids = (blend) => blend.chunks.map(({ id }) => id);

function inMemory(name, blend) {
  if (!blend.prefix_cache_tokens) return "";
  return `${blend.prefix_cache_tokens} of the ${name}'s ${blend.prompt_tokens} prompt tokens were still in memory from an earlier prompt.`;
}
