// The frame: navigation, the list of chats, language and theme; which view is shown is in the address after #.
import { server } from "./api.js";
import * as activity from "./activity.js";
import * as chat from "./chat.js";
import * as connect from "./connect.js";
import * as api from "./openapi.js";
import { LANGUAGES, applyTheme, h, icon, iconButton, language, put, settings, t } from "./dom.js";
import * as models from "./models.js";
import { chats } from "./store.js";

const REFRESH_SECONDS = 3;
const VIEWS = { chat, models, activity, connect, api };
const first = location.pathname.endsWith("/docs") ? "api" : "chat";
applyTheme();

const banner = h("p", { class: "banner", role: "alert", hidden: true }, t("unreachable"));
const main = h("main", { id: "main", tabindex: -1 });
const links = Object.keys(VIEWS).map((name) => h("a", { href: `#/${name}`, "data-view": name }, icon(name), t(name)));
const chatList = h("ul", { class: "chat-list", "aria-label": t("chats") });
const version = h("span", { class: "muted" });
const select = (label, options, value, onchange) => h("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) },
  Object.entries(options).map(([key, text]) => h("option", { value: key, ".selected": key === value }, text)));
const sidebar = h("aside", { id: "sidebar", popover: "auto", "aria-label": t("navigation"), ontoggle: (event) => event.newState === "open" && links[0].focus(),
  onclick: (event) => event.target.closest("a") && sidebar.togglePopover(false) },
  h("div", { class: "brand" }, h("img", { src: "page/icon.svg", alt: "", width: 22, height: 22 }), h("strong", {}, "mlx-backend"), version),
  h("nav", { "aria-label": t("views") }, links),
  h("a", { class: "new-chat", href: "#/chat/new" }, icon("plus"), t("newChat")),
  chatList,
  h("div", { class: "row choices" },
    select(t("language"), LANGUAGES, language, (value) => { settings.set("language", value); location.reload(); }),
    select(t("theme"), { "": t("themeSystem"), light: t("themeLight"), dark: t("themeDark") }, settings.get("theme") || "",
      (value) => { settings.set("theme", value || null); applyTheme(value); })));
// On a narrow screen the sidebar is a popover, which the browser opens and closes.
const menu = iconButton("menu", t("navigation"), null, { class: "icon-button menu", popovertarget: "sidebar" });

function drawChats() {
  const current = chat.openId(), hadFocus = chatList.contains(document.activeElement);
  put(chatList, chats.isFull ? h("li", { class: "problem", role: "alert" }, t("full")) : null, chats.list.filter((each) => each.messages.length).map((each) => h("li", {},
    h("a", { href: `#/chat/${each.id}`, "aria-current": each.id === current && location.hash.startsWith("#/chat") ? "page" : null }, each.title || t("chat")),
    iconButton("trash", t("deleteChat", { title: each.title }), async () => {
      if (!confirm(t("deleteChat", { title: each.title }))) return;
      await chats.remove(each.id);
      (chatList.querySelector("a") || links[0]).focus();
    }))));
  if (hadFocus && !chatList.contains(document.activeElement)) chatList.querySelector("[aria-current]")?.focus();
}

let shown = first;

async function route() {
  const [name, id] = location.hash.replace(/^#\//, "").split("/"), next = VIEWS[name] ? name : first;
  if (main.firstChild !== VIEWS[next].view) put(main, VIEWS[next].view);
  shown = next;
  for (const link of links) link.dataset.view === next ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  document.title = `${t(next)} – mlx-backend`;
  if (next !== "api" && !server.models.length) await server.refreshModels().catch(() => server.refreshHealth());
  if (next === "chat") await chat.open(id === "new" ? undefined : id || chat.openId());
  if (next === "api") await api.open(id);
  drawChats();
  refresh();
}

async function refresh() {
  if (document.hidden) return;
  await (VIEWS[shown].refresh || (() => server.refreshHealth()))().catch(() => server.refreshHealth());
}

server.addEventListener("connection", () => {
  banner.hidden = !server.isLost;
  if (!server.isLost) server.refreshModels().catch(() => {});
});
server.addEventListener("health", () => { version.textContent = server.health?.version || ""; });
chats.addEventListener("change", drawChats);
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", refresh);

put(document.body, h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, t("skip")),
  h("div", { id: "announcements", class: "sr-only", role: "status" }), menu, sidebar, main, banner);
await chats.load();
chat.restore();
await route();
setInterval(refresh, 1000 * REFRESH_SECONDS);
