// The view that says how other programs are set up for this server: a tab for each, with its address and a model filled in.
import { base, get, server } from "./api.js";
import { copyButton, h, put, t } from "./dom.js";
import { Markdown } from "./markdown.js";

const tabs = h("div", { role: "radiogroup", "aria-label": t("clients"), class: "tabs" }), panel = h("section", { "aria-label": t("connect"), class: "panel" });
const picker = h("select", { "aria-label": t("model"), onchange: () => fill() });
let clients = [], chosen = "";

export const view = h("section", { class: "page", "aria-label": t("connect") },
  h("h1", {}, t("connect")), h("p", {}, t("connectIntro")), h("p", {}, h("label", {}, `${t("model")} `, picker)), h("div", { class: "clients" }, tabs, panel));

// The others are names.
const titleOf = (client) => (client.name === "ollama-api" ? t("ollamaClients") : client.title);
const titles = { agent: t("agents"), app: t("apps"), sdk: t("sdks") };

function snippet({ file, text }) {
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, file), copyButton(text)), h("pre", { tabindex: 0 }, h("code", {}, text)));
}

function paragraph(text) {
  const element = h("div", { class: "markdown" });
  new Markdown(element).show(text);
  return text ? element : null;
}

function show(client) {
  chosen = client.name;
  put(panel, h("h2", {}, titleOf(client)), paragraph(client.about), client.snippets.map(snippet), paragraph(client.more));
}

async function fill() {
  clients = await get(`page/clients.json?${new URLSearchParams({ url: base(), model: picker.value })}`);
  const current = clients.find((each) => each.name === chosen) || clients[0];
  const tab = (client) => h("label", {}, h("input", { type: "radio", name: "client", ".checked": client === current, onchange: () => show(client) }), h("span", {}, titleOf(client)));
  put(tabs, Object.entries(titles).map(([kind, title]) => h("div", {}, h("h2", {}, title), clients.filter((each) => each.kind === kind).map(tab))));
  show(current);
}

export async function refresh() {
  const models = server.models.filter((each) => each.type === "llm").map((each) => each.id);
  if (clients.length && models.join() === [...picker.options].map((each) => each.value).join()) return server.refreshHealth();
  const kept = picker.value;
  put(picker, models.map((each) => h("option", { value: each }, each)));
  if (models.includes(kept)) picker.value = kept;
  await fill();
}
