// Elements, words in the reader's language, numbers: what every view is made with. Never sets HTML from a string.
import { WORDS } from "./words.js";

export const LANGUAGES = { en: "English", ja: "日本語", zh: "中文" };

/** Texts by name that the browser keeps; null takes one away. Some browsers keep nothing. */
const keeper = (storage) => ({
  get: (name) => { try { return window[storage].getItem(`mlx-backend.${name}`); } catch { return null; } },
  set: (name, value) => { try { value === null ? window[storage].removeItem(`mlx-backend.${name}`) : window[storage].setItem(`mlx-backend.${name}`, value); } catch { /* full */ } },
});
export const settings = keeper("localStorage"), ofTab = keeper("sessionStorage");

const codes = Object.keys(LANGUAGES);
const wanted = [settings.get("language"), ...(navigator.languages || [])].map((each) => each?.slice(0, 2));
export const language = wanted.find((each) => codes.includes(each)) || "en";
document.documentElement.lang = language === "zh" ? "zh-Hans" : language;

/** The text of a key in the reader's language; {names} are filled in. */
export function t(key, values = {}) {
  const text = WORDS[key]?.[codes.indexOf(language)] ?? key.split(".").pop();
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

const isNothing = (value) => value === undefined || value === null || value === false;

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (isNothing(value)) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) element[name.slice(1)] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, children);
}

/** An element: attributes by name, listeners as on…, properties as .name; children are nodes, texts or nothing. */
export const h = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Have an element hold these nodes and texts, and no others; null, undefined and false are nothing. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((each) => !isNothing(each)));
  return element;
}

const ICONS = {
  chat: "M4 5h16v11H9l-4 4v-4H4z", models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  activity: "M3 12h4l3-8 4 16 3-8h4", connect: "M9 7H7a5 5 0 000 10h2M15 7h2a5 5 0 010 10h-2M8 12h8",
  api: "M6 3h9l4 4v14H6zM14 3v5h5M9 13h7M9 17h7", plus: "M12 5v14M5 12h14", menu: "M4 7h16M4 12h16M4 17h16",
  send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z", copy: "M9 9h11v11H9zM5 15H4V4h11v1", check: "M5 12l5 5 9-11",
  retry: "M4 12a8 8 0 108-8 8 8 0 00-6 3M6 3v4h4", edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", image:
    "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01", close: "M6 6l12 12M18 6L6 18", settings:
    "M4 8h8M18 8h2M4 16h2M12 16h8M12 8a3 3 0 106 0 3 3 0 10-6 0M6 16a3 3 0 106 0 3 3 0 10-6 0", trash:
    "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", more: "M5 12h14M13 6l6 6-6 6", down: "M12 5v14M6 13l6 6 6-6",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, path);
}

/** A button that shows an icon and is called by a word. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name));
}

export function copyButton(text, label = t("copy")) {
  const button = iconButton("copy", label, async () => {
    await copy(typeof text === "function" ? text() : text);
    put(button, icon("check"));
    announce(t("copied"));
    setTimeout(() => put(button, icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have no clipboard for pages that come over plain HTTP from another machine.
  const area = h("textarea", { class: "sr-only", ".value": text });
  (document.querySelector("dialog[open]") || document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Say something to screen readers. */
export function announce(text) {
  document.getElementById("announcements").textContent = text;
}

/** A modal dialog, which is gone once it is closed. */
export function openDialog(title, ...content) {
  const close = iconButton("close", t("close"), () => dialog.close());
  const dialog = h("dialog", { "aria-label": title, closedby: "any", onclose: () => dialog.remove() },
    h("header", {}, h("h2", {}, title), close), ...content);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

const digits = (most) => new Intl.NumberFormat(language, { maximumSignificantDigits: most });
const whole = new Intl.NumberFormat(language), short = digits(3), rough = digits(2);
export const count = (value) => whole.format(value);
export const number = (value) => short.format(value);
export const seconds = (value) => (value < 100 ? `${(value < 10 ? rough : short).format(value)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`);
export const percent = (value) => `${Math.round(100 * value)} %`;
export const time = (at) => new Date(at * 1000).toLocaleTimeString(language, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

// Of memory, in the units of --memory-gb and of a Mac's "32 GB": multiples of 1024.
export function bytes(value) {
  const unit = value >= 2 ** 30 ? [2 ** 30, "GB"] : value >= 2 ** 20 ? [2 ** 20, "MB"] : [2 ** 10, "KB"];
  return `${short.format(value / unit[0])} ${unit[1]}`;
}

export function applyTheme(theme = settings.get("theme")) {
  document.documentElement.style.colorScheme = theme || "light dark";
}
