// Small helpers over the DOM. Text is set as text everywhere: nothing of a document or an answer becomes markup.

export const at = (id) => document.getElementById(id);

/** An element with properties, attributes (names with a dash, role) and children. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function button(label, onClick, properties = {}) {
  const made = el("button", { type: "button", ...properties }, label);
  made.addEventListener("click", onClick);
  return made;
}

/** Tell screen readers; sighted readers see it elsewhere. */
export function announce(text) {
  at("status").textContent = text;
}

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** A duration, with two digits or tenths of a second. */
export const seconds = (value) => `${value < 1 ? Number(value.toPrecision(2)) : value.toFixed(1)} s`;

/** Copy a text; also where the page is not a secure context, which has no clipboard API. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
