// The server's addresses: requests with the key, streams, and what goes wrong in words.
import { h, ofTab, openDialog, settings, t } from "./dom.js";

/** What went wrong, in words for the reader; `code` is the server's, or "lost". */
const failure = (message, code = "") => Object.assign(new Error(message), { code });
const lost = () => failure(t("lost"), "lost");

export const url = (path) => new URL(path, document.baseURI).href;
export const base = () => url(".").replace(/\/$/, "");

let key = settings.get("key") || ofTab.get("key");

/** The header with the key: its bytes in UTF-8, since a header's text is Latin-1. */
const withKey = () => (key ? { authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {});

/** Send a request; the response is one that is well. Asks for a key where one is needed, and sends it again. */
export async function send(path, { body, method, signal } = {}) {
  for (;;) {
    const headers = { accept: "application/json", ...withKey() };
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      const data = body === undefined ? undefined : JSON.stringify(body);
      response = await fetch(url(path), { method: method || (data ? "POST" : "GET"), body: data, headers, signal, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw lost();
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    const message = error?.message || t("status", { status: response.status });
    if (response.status !== 401) throw failure(message, error?.code);
    await askForKey(message);
  }
}

export const get = async (path) => (await send(path)).json();
export const post = async (path, body) => (await send(path, { method: "POST", body })).json();

let asking = null;

/** Ask for the key, once for all requests that wait for it. */
function askForKey(message) {
  asking ||= new Promise((resolve, reject) => {
    const input = h("input", { type: "password", autocomplete: "current-password", required: true, id: "key", "aria-describedby": "key-note" });
    const remember = h("input", { type: "checkbox" });
    let given = false;
    const form = h("form", { method: "dialog", class: "stack", onsubmit: () => {
      given = true;
      key = input.value.trim();
      settings.set("key", remember.checked ? key : null);
      ofTab.set("key", key);
    } },
      h("p", { id: "key-note" }, key ? message : t("keyNeeded")),
      h("label", { for: "key" }, t("key")), input,
      h("label", { class: "check" }, remember, t("rememberKey")),
      h("button", { class: "primary" }, t("useKey")));
    openDialog(t("key"), form).addEventListener("close", () => {
      asking = null;
      given ? resolve() : reject(failure(message));
    });
    input.focus();
  });
  return asking;
}

/** Yield the JSON of each event of a stream. Throws what the server says went wrong, and if the stream breaks off. */
export async function* stream(path, body, signal) {
  const response = await send(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isWhole = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done && isWhole) return;
      if (done) throw lost();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const queued = /^: keepalive queued (\d+)/.exec(line);
        if (queued) yield { choices: [], queued: Number(queued[1]) };
        if (!line.startsWith("data: ")) continue;
        isWhole ||= line === "data: [DONE]";
        if (isWhole) break;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw failure(event.error.message, event.error.code || "");
        yield event;
      }
    }
  } catch (error) {
    if ("code" in error) throw error; // an AbortError has one, too
    throw lost();
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What is known of the server: its models and how they are. Tells of `models`, `health` and `connection`. */
export const server = Object.assign(new EventTarget(), {
  models: [], health: null, isLost: false,

  async refreshModels() {
    const { data } = await get("v1/models");
    this.models = data;
    this.dispatchEvent(new Event("models"));
  },

  async refreshHealth() {
    let health = null;
    try {
      const response = await fetch(url("health"), { headers: withKey(), cache: "no-store" });
      health = await response.json();
    } catch { /* it cannot be reached */ }
    const wasLost = this.isLost;
    Object.assign(this, { isLost: health === null, health });
    this.dispatchEvent(new Event("health"));
    if (wasLost !== this.isLost) this.dispatchEvent(new Event("connection"));
  },
});
