// The view that says how other programs are set up for this server: a tab for each, with its address and a model filled in.
import { base, get, server } from "./api.js";
import { copyButton, h, put, t } from "./dom.js";
import { Markdown } from "./markdown.js";

const tabs = h("div", { role: "tablist", "aria-label": t("clients"), "aria-orientation": "vertical", class: "tabs" }), panel = h("div", { role: "tabpanel", tabindex: 0, "aria-label": t("clients"), class: "panel" });
const picker = h("select", { "aria-label": t("model"), onchange: () => fill() });
let clients = [], chosen = 0;

export const view = h("section", { class: "page", "aria-label": t("connect") },
  h("h1", {}, t("connect")), h("p", {}, t("connectIntro")), h("p", {}, h("label", {}, `${t("model")} `, picker)), h("div", { class: "clients" }, tabs, panel));

const titles = { agent: t("agents"), app: t("apps"), sdk: t("sdks") };

function snippet({ file, text }) {
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, file), copyButton(text)), h("pre", { tabindex: 0 }, h("code", {}, text)));
}

function paragraph(text) {
  const element = h("div", { class: "markdown" });
  new Markdown(element).show(text);
  return text ? element : null;
}

function show(index, hasFocus = false) {
  chosen = index;
  const client = clients[index];
  [...tabs.querySelectorAll("button")].forEach((tab, at) => {
    tab.setAttribute("aria-selected", at === index);
    tab.tabIndex = at === index ? 0 : -1;
    if (at === index && hasFocus) tab.focus();
  });
  panel.setAttribute("aria-label", client.title);
  put(panel, h("h2", {}, client.title), paragraph(client.about), ...client.snippets.map(snippet), paragraph(client.more));
}

function onkeydown(event) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -chosen, End: clients.length - 1 - chosen };
  if (!(event.key in steps)) return;
  event.preventDefault();
  show((chosen + steps[event.key] + clients.length) % clients.length, true);
}

async function fill() {
  clients = await get(`page/clients.json?${new URLSearchParams({ url: base(), model: picker.value })}`);
  put(tabs, Object.entries(titles).map(([kind, title]) => h("div", { role: "presentation" }, h("h2", { role: "presentation" }, title),
    clients.map((client, index) => client.kind === kind && h("button", { type: "button", role: "tab", onclick: () => show(index), onkeydown }, client.title)))));
  show(Math.min(chosen, clients.length - 1));
}

export async function refresh() {
  const models = server.models.filter((each) => each.type === "llm").map((each) => each.id);
  if (clients.length && models.join() === [...picker.options].map((each) => each.value).join()) return server.refreshHealth();
  const kept = picker.value;
  put(picker, models.map((each) => h("option", { value: each }, each)));
  if (models.includes(kept)) picker.value = kept;
  await fill();
}
