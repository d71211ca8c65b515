// The view that says how other programs are set up for this server: a tab for each, with its address and a model filled in.
import { base, get, server } from "./api.js";
import { copyButton, h, t } from "./dom.js";

const tabs = h("div", { role: "tablist", "aria-label": t("clients"), class: "tabs" }), panel = h("div", { role: "tabpanel", tabindex: 0, class: "panel" });
const picker = h("select", { "aria-label": t("model"), onchange: () => show(chosen) });
let clients = [], chosen = 0;

export const view = h("section", { class: "page", "aria-label": t("connect") },
  h("h1", {}, t("connect")), h("p", {}, t("connectIntro")), h("p", {}, h("label", {}, `${t("model")} `, picker)), tabs, panel);
