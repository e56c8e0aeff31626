// Settings of a question, and the theme. What is left empty is the server's default.
import { at, el } from "./dom.js";

const KEPT = "cacheblend.settings";
const THEME = "cacheblend.theme";
const NAMES = ["mode", "ratio", "k", "max_tokens", "temperature"];
const THEMES = ["system", "light", "dark"];

/** Show the server's defaults where nothing is chosen, and what was chosen before. */
export function showSettings(defaults) {
  for (const name of NAMES.slice(1)) at(name).placeholder = `${defaults[name]}`;
  at("mode").options[0].textContent = `default: ${defaults.mode}`;
  const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  for (const name of NAMES) at(name).value = kept[name] ?? "";
  at("search").checked = kept.search ?? true;
  mark();
}

export function watchSettings() {
  at("settings").addEventListener("input", keep);
  at("settings").addEventListener("submit", (event) => event.preventDefault());
  at("reset").addEventListener("click", () => {
    for (const name of NAMES) at(name).value = "";
    at("search").checked = true;
    keep();
  });
  at("show-settings").addEventListener("click", () => openSettings(at("settings").hidden));
}

export function openSettings(open) {
  at("settings").hidden = !open;
  at("show-settings").setAttribute("aria-expanded", `${open}`);
  if (open) at("mode").focus();
}

function keep() {
  const values = Object.fromEntries(NAMES.map((name) => [name, at(name).value]));
  localStorage.setItem(KEPT, JSON.stringify({ ...values, search: at("search").checked }));
  mark();
}

/** The button says when something is not the default. */
function mark() {
  const changed = NAMES.filter((name) => at(name).value !== "").length + (at("search").checked ? 0 : 1);
  at("show-settings").replaceChildren("Settings", ...(changed ? [el("span", { className: "wide" }, ` (${changed} changed)`), el("span", { className: "narrow" }, "*")] : []));
}

/** Whether the form's values can be sent; the browser shows what is wrong. */
export function checkSettings() {
  if (at("settings").checkValidity()) return true;
  openSettings(true);
  at("settings").reportValidity();
  return false;
}

/** The fields of a request that the settings say. */
export function chosen() {
  const number = (name) => (at(name).value === "" ? {} : { [name]: Number(at(name).value) });
  const blend = { ...(at("mode").value ? { mode: at("mode").value } : {}), ...number("ratio") };
  const search = { search: at("search").checked ? number("k") : false };
  return { ...search, ...number("max_tokens"), ...number("temperature"), ...(Object.keys(blend).length ? { blend } : {}) };
}

export function watchTheme() {
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const short = theme === "system" ? "Theme" : theme;
    at("theme").replaceChildren(el("span", { className: "wide" }, `Theme: ${theme}`), el("span", { className: "narrow" }, short));
    at("theme").setAttribute("aria-label", `Theme: ${theme}`);
  };
  let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "system";
  show(theme);
  at("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, theme);
    show(theme);
  });
}
