// The view of a chat: its messages, what is written next, and how much the model shall reason about it.
import { server } from "./api.js";
import { announce, copyButton, count, h, icon, iconButton, number, openDialog, put, seconds, settings, t } from "./dom.js";
import { Markdown } from "./markdown.js";
import { SAMPLING, asMarkdown, newReply, receive, requestOf } from "./reply.js";
import { chats } from "./store.js";

const MAX_SIDE = 2048, MAX_IMAGES = 16, TICK_MS = 100, SAVE_TICKS = 20;
const running = new Map(); // chats whose reply is coming: their AbortController
const list = h("div", { class: "messages" });
let chat = null, shown = [], images = [];

const isLive = (message) => ["waiting", "reasoning", "answering"].includes(message.state);
const modelOf = (name) => server.models.find((each) => each.id === name);
const chatModels = () => server.models.filter((each) => each.type === "llm");
const levelsOf = (model) => model?.reasoning?.efforts || [];
const sees = () => modelOf(chat.model)?.capabilities.includes("vision");

function newChat() {
  const last = JSON.parse(settings.get("last") || "{}");
  const model = modelOf(last.model)?.id || chatModels()[0]?.id || "";
  return {
    id: crypto.randomUUID?.() || `${Date.now()}-${Math.random()}`, title: "", created: Date.now(), updated: Date.now(), bytes: 0, model,
    effort: last.effort || null, system: "", sampling: {}, tools: "", messages: [],
  };
}

function remember() {
  settings.set("last", JSON.stringify({ model: chat.model, effort: chat.effort }));
}

// -- one message -----------------------------------------------------------------------------------------------------

class MessageView {
  constructor(message) {
    this.message = message;
    this.element = h("article", { class: `message ${message.role}`, "aria-label": t(message.role) });
    message.role === "assistant" ? this.assistant() : message.role === "user" ? this.user() : this.tool();
  }

  user() {
    const { message } = this;
    const pictures = message.images.map((address, index) => h("img", { src: address, alt: t("pictureNumber", { number: index + 1 }) }));
    put(this.element, 
      h("div", { class: "bubble" }, pictures.length ? h("div", { class: "pictures" }, pictures) : null, h("div", { class: "said" }, message.text)),
      h("div", { class: "actions" }, copyButton(() => message.text), iconButton("edit", t("edit"), () => this.edit())));
  }

  edit() {
    const area = h("textarea", { ".value": this.message.text, "aria-label": t("edit"), rows: 3 });
    const cancel = h("button", { type: "button", onclick: () => { this.user(); this.element.querySelector("button").focus(); } }, t("cancel"));
    const form = h("form", { class: "bubble stack", onsubmit: (event) => { event.preventDefault(); again(this.message, area.value.trim()); } },
      area, h("div", { class: "row" }, h("button", { class: "primary" }, t("sendAgain")), cancel));
    area.addEventListener("keydown", (event) => event.key === "Escape" && cancel.click());
    put(this.element, form);
    area.focus();
  }

  tool() {
    this.element.append(h("div", { class: "call" }, h("strong", {}, t("resultOf", { name: this.message.name })), h("pre", { tabindex: 0 }, this.message.text)));
  }

  assistant() {
    this.summary = h("summary", {});
    this.thinking = h("div", { class: "thinking" });
    this.reasoning = h("details", { class: "reasoning", hidden: true, ontoggle: () => this.update() }, this.summary, this.thinking);
    this.waiting = h("div", { class: "waiting" });
    this.body = h("div", { class: "markdown" });
    this.calls = h("div", { class: "calls" });
    this.problem = h("div");
    this.footer = h("footer");
    this.markdown = new Markdown(this.body);
    this.element.append(this.reasoning, this.waiting, this.body, this.calls, this.problem, this.footer);
    this.update();
  }

  update() {
    const { message } = this;
    if (message.role !== "assistant") return;
    const live = isLive(message), tokens = message.usage?.completion_tokens_details?.reasoning_tokens;
    this.element.setAttribute("aria-busy", live);
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      const facts = [seconds(message.seconds), tokens ? t("tokens", { count: count(tokens) }) : null].filter(Boolean).join(" · ");
      const isReasoning = message.state === "reasoning";
      const line = message.reasoning.trimEnd().split("\n").pop().slice(-160);
      put(this.summary, h("span", { class: isReasoning ? "pulse" : "" }, t(isReasoning ? "reasoning" : "reasoned")), h("span", { class: "facts" }, facts),
        isReasoning && !this.reasoning.open ? h("span", { class: "preview", "aria-hidden": "true" }, h("bdi", {}, line)) : null);
      if (this.reasoning.open && this.thinking.textContent !== message.reasoning) this.thinking.textContent = message.reasoning;
    }
    this.waiting.hidden = message.state !== "waiting";
    if (message.state === "waiting") put(this.waiting, h("span", { class: "pulse" }, this.waitingFor()));
    this.markdown.show(message.text, !live);
    this.body.classList.toggle("growing", message.state === "answering");
    put(this.calls, message.calls.map((call) => this.call(call)));
    if (live) return put(this.footer);
    put(this.problem, this.problems());
    put(this.footer, this.facts(), this.actions());
  }

  waitingFor() {
    const { progress } = this.message;
    if (progress?.total) return t("prefill", { done: count(progress.processed), total: count(progress.total) });
    const health = server.health?.models?.find((each) => each.model === (modelOf(chat?.model)?.root || chat?.model));
    if (health && ["loading", "downloading"].includes(health.state)) return t(`${health.state}Percent`, { percent: health.percent ?? 0 });
    return this.message.queued ? t("queued", { count: count(this.message.queued) }) : t("waiting");
  }

  call({ id, name, input }) {
    const result = chat.messages.find((each) => each.role === "tool" && each.id === id);
    let shown = input;
    try { shown = JSON.stringify(JSON.parse(input), null, 2); } catch { /* it is still coming */ }
    const box = h("div", { class: "call" }, h("strong", {}, t("calls", { name })), h("pre", { tabindex: 0 }, shown));
    if (!result && this.message.state === "done" && this.message === chat.messages.at(-1)) {
      const old = this.element.querySelector(`textarea[data-id="${CSS.escape(id)}"]`);
      box.append(old || h("textarea", { "data-id": id, rows: 2, "aria-label": t("resultOf", { name }), placeholder: t("resultOf", { name }) }));
    }
    return box;
  }

  problems() {
    const { message } = this;
    const why = message.state === "error" ? message.error.text : message.finish === "length" ? t("cut") :
      message.state === "stopped" ? t("stopped") : message.timings?.stopped_by === "repetition" ? t("repeated") : null;
    return why ? [h("p", { class: message.state === "error" ? "problem" : "note", role: message.state === "error" ? "alert" : null }, why)] : [];
  }

  facts() {
    const { usage, timings, decided, firstToken, answeredBy } = this.message;
    const parts = [];
    if (answeredBy && answeredBy !== chat.model) parts.push(answeredBy);
    if (decided && levelsOf(modelOf(answeredBy)).length) {
      const told = decided.level && decided.level !== decided.effort ? ` → ${t(decided.level)}` : "";
      parts.push(h("span", { class: "effort-fact" }, `${t("effort")} ${t(decided.effort)}${told} (${t(`source.${decided.source}`)})`));
    }
    if (usage) {
      const reasoning = usage.completion_tokens_details?.reasoning_tokens;
      parts.push(t("tokens", { count: count(usage.completion_tokens) }) + (reasoning ? ` (${t("ofReasoning", { count: count(reasoning) })})` : ""));
      const cached = usage.prompt_tokens_details?.cached_tokens || 0;
      parts.push(t("promptFact", { count: count(usage.prompt_tokens), cached: count(cached) }));
    }
    const first = timings ? timings.first_token_ms / 1000 : firstToken;
    if (first) parts.push(`${t("first")} ${seconds(first)}`);
    if (timings?.predicted_per_second) parts.push(`${number(timings.predicted_per_second)} ${t("rate")}`);
    return h("div", { class: "facts" }, parts.map((each) => h("span", {}, each)));
  }

  actions() {
    const { message } = this, isLast = message === chat.messages.at(-1);
    const isUnfinished = message.state === "stopped" || message.state === "error" || message.finish === "length";
    const actions = [copyButton(() => message.text), iconButton("retry", t("retry"), () => again(message))];
    if (isLast && isUnfinished && message.text && !message.calls.length) actions.push(iconButton("more", t("continue"), () => running.has(chat.id) || ask(message, false)));
    if (isLast && message.state === "done" && message.calls.length) {
      actions.push(h("button", { type: "button", class: "primary", onclick: () => giveResults(message, this.element) }, t("sendResults")));
    }
    return h("div", { class: "actions" }, actions);
  }
}

// -- the conversation ------------------------------------------------------------------------------------------------

function draw() {
  shown = chat.messages.map((message) => new MessageView(message));
  put(list, (shown.length ? shown.map((each) => each.element) : [emptyChat()]));
  drawComposer();
  scroll(true);
}

function emptyChat() {
  const isDemo = /^mlx-demo/.test(chat.model), questions = chat.model === "mlx-demo" ? ["What is the capital of France?", "What is 17 + 5?", "Count to 30."] :
    chat.model === "mlx-demo-vision" ? ["What is in this picture?"] : [];
  const ask = (text) => h("button", { type: "button", class: "chip", onclick: () => { composer.value = text; sees() ? composer.focus() : send(); } }, text);
  return h("div", { class: "empty" }, h("h1", {}, t("hello")), isDemo ? h("p", {}, t("demo")) : null, h("div", { class: "chips" }, questions.map(ask)));
}

async function ask(reply = newReply(), isNew = true) {
  const asked = chat, controller = new AbortController();
  let body;
  try { body = requestOf(asked, effortOf(asked)); } catch { draw(); return openSettings(t("toolsWrong")); }
  if (isNew) asked.messages.push(reply);
  running.set(asked.id, controller);
  draw();
  let ticks = 0, said = "";
  const onTick = () => {
    if (reply.state !== said) announce(t((said = reply.state)));
    if (reply.state === "waiting" && ticks % 10 === 0) server.refreshHealth();
    if (ticks++ % SAVE_TICKS === 0) chats.save(asked);
    if (chat !== asked) return;
    shown.find((each) => each.message === reply)?.update();
    scroll();
  };
  onTick();
  const timer = setInterval(onTick, TICK_MS);
  await receive(reply, body, controller.signal);
  clearInterval(timer);
  announce(t(reply.state));
  running.delete(asked.id);
  if (reply.error?.code === "lost") server.refreshHealth();
  asked.updated = Date.now();
  await chats.save(asked);
  if (chat === asked) {
    shown.forEach((each) => each.update());
    drawComposer();
    scroll();
  }
}

function send() {
  const text = composer.value.trim();
  if (running.has(chat.id) || !(text || images.length)) return;
  chat.title ||= (text || t("picture")).slice(0, 80);
  chat.updated = Date.now();
  chat.messages.push({ role: "user", text, images });
  composer.value = "";
  images = [];
  history.replaceState(null, "", `#/chat/${chat.id}`);
  ask();
}

/** Answer anew from a message on: what came after it goes. With a `text` it is a question that was changed. */
function again(message, text) {
  if (running.has(chat.id) || text === "") return;
  const end = chat.messages.indexOf(message) + (message.role === "user" ? 1 : 0);
  if (chat.messages.length > end + 1 && !confirm(t("dropsLater"))) return;
  if (text !== undefined) message.text = text;
  chat.messages.length = end;
  ask();
}

function giveResults(message, element) {
  for (const call of message.calls) {
    const text = element.querySelector(`textarea[data-id="${CSS.escape(call.id)}"]`)?.value || "";
    chat.messages.push({ role: "tool", id: call.id, name: call.name, text });
  }
  ask();
}

// -- what is written next --------------------------------------------------------------------------------------------

const composer = h("textarea", {
  rows: 1, id: "composer", placeholder: t("placeholder"), "aria-label": t("placeholder"), enterkeyhint: "send",
  onkeydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends a word's conversion
    event.preventDefault();
    send();
  },
  oninput: () => { composer.rows = Math.min(8, composer.value.split("\n").length); }, // where CSS cannot do it
  onpaste: (event) => addImages(event.clipboardData.files) && event.preventDefault(),
});
const picker = h("select", { "aria-label": t("model"), onchange: () => { chat.model = picker.value; remember(); draw(); } });
const dial = h("fieldset", { class: "dial" });
const pictures = h("div", { class: "pictures" });
const file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => { addImages(file.files); file.value = ""; } });
const attach = iconButton("image", t("addPicture"), () => file.click());
const stop = () => { running.get(chat.id).abort(); composer.focus(); };
const button = h("button", { type: "button", class: "send", onclick: () => (running.has(chat.id) ? stop() : send()) });
const toEnd = iconButton("down", t("toEnd"), () => scroll(true), { class: "icon-button to-end", hidden: true });
const notice = h("p", { class: "note", role: "status" });

/** The effort that a chat sends: the chosen one, where its model has that level. */
const effortOf = (each) => (levelsOf(modelOf(each.model)).includes(each.effort) ? each.effort : null);

function drawComposer() {
  const model = modelOf(chat.model), levels = levelsOf(model), isRunning = running.has(chat.id);
  put(picker, chatModels().map((each) => h("option", { value: each.id }, each.id)));
  if (!model && chat.model) picker.append(h("option", { value: chat.model }, chat.model));
  picker.value = chat.model;
  const described = Object.fromEntries((model?.supported_reasoning_levels || []).map((each) => [each.effort, each.description]));
  const focused = dial.contains(document.activeElement) ? document.activeElement.value : null;
  const level = (value, label, title) => h("label", { title }, h("input", {
    type: "radio", name: "effort", value, ".checked": (effortOf(chat) || "") === value,
    onchange: () => { chat.effort = value || null; remember(); if (chat.messages.length) chats.save(chat); },
  }), h("span", {}, label));
  const standard = model?.reasoning?.default;
  put(dial, h("legend", {}, t("effort")),
    ...(levels.length ? [level("", t("auto"), standard ? `${t("source.default")}: ${t(standard)}` : t("source.default")), ...levels.map((each) => level(each, t(each), described[each]))]
      : [h("span", { class: "muted" }, t("noEffort"))]));
  if (focused !== null) dial.querySelector(`input[value="${focused}"]`)?.focus();
  dial.disabled = !levels.length;
  attach.hidden = !sees();
  put(pictures, images.map((address, index) => h("div", {}, h("img", { src: address, alt: t("pictureNumber", { number: index + 1 }) }),
    iconButton("close", t("removePicture"), () => { images.splice(index, 1); drawComposer(); composer.focus(); }))));
  put(button, icon(isRunning ? "stop" : "send"));
  button.setAttribute("aria-label", t(isRunning ? "stop" : "send"));
  button.title = t(isRunning ? "stop" : "send");
}

/** Add the images among some files; return whether there are any. Large ones are made smaller, as the model would. */
function addImages(files) {
  const found = [...files].filter((each) => each.type.startsWith("image/")).slice(0, MAX_IMAGES - images.length);
  if (!found.length) return false;
  if (!sees()) { notice.textContent = t("cannotSee", { model: chat.model }); return true; }
  notice.textContent = "";
  Promise.all(found.map(readImage)).then((read) => { images.push(...read); drawComposer(); }, () => { notice.textContent = t("noPicture"); });
  return true;
}

async function readImage(picture) {
  const bitmap = await createImageBitmap(picture), scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(picture.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.9);
}

// -- settings of a chat ----------------------------------------------------------------------------------------------

function openSettings(problem = "") {
  const defaults = modelOf(chat.model)?.sampling_defaults || {}, save = () => chat.messages.length && chats.save(chat);
  const area = (name, rows) => h("label", {}, t(name), h("textarea", { rows, ".value": chat[name], placeholder: t(`${name}Hint`),
    spellcheck: name === "system" ? null : "false", onchange: (event) => { chat[name] = event.target.value; save(); } }));
  const field = ([name, [min, max, step]]) => h("label", {}, t(name), h("input", {
    type: "number", min, max, step, value: chat.sampling[name] ?? "", placeholder: defaults[name] ?? t("auto"), onchange: (event) => {
      const { value, validity } = event.target;
      if (value !== "" && (validity.valid || validity.stepMismatch)) chat.sampling[name] = Number(value);
      else delete chat.sampling[name];
      if (validity.badInput || validity.rangeOverflow || validity.rangeUnderflow) event.target.reportValidity();
      save();
    },
  }));
  const download = (name, type, text) => {
    const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const name = (chat.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  openDialog(t("chatSettings"), problem ? h("p", { class: "problem", role: "alert" }, problem) : null, h("div", { class: "stack" }, area("system", 4),
    h("div", { class: "fields" }, Object.entries(SAMPLING).map(field)), area("tools", 4),
    h("div", { class: "row" },
      h("button", { type: "button", onclick: () => download(`${name}.md`, "text/markdown", asMarkdown(chat)) }, t("exportMarkdown")),
      h("button", { type: "button", onclick: () => download(`${name}.json`, "application/json", JSON.stringify(chat, null, 1)) }, t("exportJson"))),
    h("p", { class: "muted" }, t("keptHere"))));
}

// -- the view --------------------------------------------------------------------------------------------------------

const scroller = h("div", { class: "scroller", onscroll: () => { toEnd.hidden = isAtEnd(); } }, list);
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
let follows = true; // what comes is followed until somebody scrolls away from the end
for (const gesture of ["wheel", "touchmove", "keyup"]) scroller.addEventListener(gesture, () => requestAnimationFrame(() => { follows = isAtEnd(); }), { passive: true });

function scroll(isForced = false) {
  if (isForced) follows = true;
  if (follows) scroller.scrollTop = scroller.scrollHeight;
  toEnd.hidden = isAtEnd();
}

export const view = h("section", { class: "chat", "aria-label": t("chat"),
  ondragover: (event) => { event.preventDefault(); view.classList.add("dropping"); },
  ondragleave: () => view.classList.remove("dropping"),
  ondrop: (event) => { event.preventDefault(); view.classList.remove("dropping"); addImages(event.dataTransfer.files); } },
  h("header", { class: "bar" }, picker, iconButton("settings", t("chatSettings"), () => openSettings())),
  scroller,
  h("div", { class: "foot" }, toEnd, notice, h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); send(); } },
    pictures, composer, h("div", { class: "row" }, attach, file, dial, button))));

export async function open(id) {
  const found = id && chats.list.find((each) => each.id === id);
  if (found ? chat === found : chat && !chat.messages.length) return draw();
  chat = found || newChat();
  images = [];
  for (const message of chat.messages) if (isLive(message) && !running.has(chat.id)) message.state = "stopped"; // the page was left
  draw();
  if (matchMedia("(hover: hover)").matches && !document.querySelector(":popover-open")) composer.focus();
}

export const openId = () => chat?.id;
server.addEventListener("models", () => {
  if (!chat) return;
  if (!chat.model) chat.model = newChat().model;
  chat.messages.length ? drawComposer() : draw();
});
chats.addEventListener("change", () => {
  const isGone = (id) => !chats.list.some((each) => each.id === id);
  for (const [id, controller] of running) if (isGone(id)) controller.abort();
  if (chat?.messages.length && isGone(chat.id)) open();
});

// IndexedDB writes too late for a page that is being left: what has come of a reply goes through localStorage.
addEventListener("pagehide", () => {
  const left = chats.list.filter((each) => running.has(each.id)).map((each) => [each.id, each.messages.at(-1)]);
  if (left.length) settings.set("unsaved", JSON.stringify(left));
});

/** Put back what had come of replies when the page was left. */
export function restore() {
  const unsaved = new Map(JSON.parse(settings.get("unsaved") || "[]"));
  for (const left of chats.list.filter((each) => unsaved.has(each.id))) chats.save(Object.assign(left, { messages: [...left.messages.slice(0, -1), unsaved.get(left.id)] }));
  settings.set("unsaved", null);
}
