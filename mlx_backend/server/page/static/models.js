// The view of the models: how each is, what it can do, whether it fits; loading and unloading.
import { get, post, server } from "./api.js";
import { announce, bytes, count, h, put, t } from "./dom.js";

const BUSY = ["loading", "downloading", "unloading", "restarting"];
const memory = h("div", { class: "memory" });
const list = h("div", { class: "cards" });
const problem = h("p", { class: "problem", role: "alert", hidden: true });
const asked = new Map(); // what was asked of a model, until it is so
let activity = null;

export const view = h("section", { class: "page", "aria-label": t("models") }, h("h1", {}, t("models")), memory, problem, list);

export function memoryBar(use) {
  if (!use) return [];
  const label = t("memoryFact", { reserved: bytes(use.reserved), used: bytes(use.used), limit: bytes(use.limit) });
  return [h("div", { class: "memory-label" }, h("strong", {}, t("memory")), h("span", {}, label)),
    h("meter", { min: 0, max: use.limit, high: use.limit * 0.9, value: use.reserved, "aria-label": `${t("memory")}: ${label}` })];
}

async function change(model, action) {
  asked.set(model.id, action);
  problem.hidden = true;
  draw();
  try {
    const { message } = await post(`v1/models/${encodeURIComponent(model.id)}/${action}`);
    announce(`${model.id}: ${action === "load" ? t("ready") : message}`);
  } catch (error) {
    Object.assign(problem, { textContent: `${model.id}: ${error.message}`, hidden: false });
  }
  asked.delete(model.id);
  await refresh();
}

function card(model, aliases) {
  const health = server.health?.models?.find((each) => each.model === model.id);
  const state = health?.state || model.state, size = activity?.models.find((each) => each.model === model.id);
  const isBusy = BUSY.includes(state) || asked.has(model.id), isIn = ["ready", "restarting"].includes(state);
  const row = (label, value) => value ? [h("dt", {}, label), h("dd", {}, value)] : null;
  const chip = (text, isChosen) => h("span", { class: isChosen ? "chip chosen" : "chip" }, isChosen ? `${text} (${t("standard")})` : text);
  const chips = (made) => (made?.length ? h("span", { class: "chips" }, made) : null);
  return h("article", { class: "card", "aria-label": model.id },
    h("header", {}, h("h2", {}, model.id), h("span", { class: `state ${state}` }, t(state) + (isBusy && health?.percent !== undefined ? ` ${health.percent} %` : ""))),
    health?.percent !== undefined ? h("progress", { max: 100, value: health.percent, "aria-label": t(state) }) : null,
    h("dl", {},
      row(t("kind"), t(`type.${model.type}`)),
      row(t("effort"), chips(model.reasoning?.efforts.map((each) => chip(t(each), each === model.reasoning.default)))),
      row(t("can"), chips(model.capabilities.filter((each) => !["completion", "embedding", "rerank"].includes(each)).map((each) => chip(t(`can.${each}`))))),
      row(t("context"), model.context_length && t("tokens", { count: count(model.context_length) }) + (model.available_context < model.context_length ? `; ${t("available", { count: count(model.available_context) })}` : "")),
      row(t("size"), size && [bytes(size.weights), size.fits === undefined ? "" : size.fits ? ` · ${t("fits")}` : h("strong", { class: "bad" }, ` · ${t("fitsNot", { room: bytes(activity.memory.max_weights) })}`)]),
      row(t("dialect"), model.dialect && h("span", { title: model.dialect.recognised_by }, model.dialect.name)),
      row(t("aliases"), aliases.join(", ")),
      row(t("shares"), model.shares),
      row(t("now"), health && (health.running || health.waiting) && t("runningFact", { running: count(health.running), waiting: count(health.waiting) })),
      row(t("detail"), health?.detail)),
    h("footer", { class: "row" },
      h("button", { type: "button", disabled: isBusy || isIn, "data-load": model.id, onclick: () => change(model, "load") }, t("load")),
      h("button", { type: "button", disabled: isBusy || !isIn, "data-unload": model.id, onclick: () => change(model, "unload") }, t("unload"))));
}

function draw() {
  const focused = document.activeElement?.dataset || {}, attribute = focused.load ? "load" : focused.unload ? "unload" : null;
  put(memory, memoryBar(activity?.memory));
  const models = server.models.filter((each) => !each.root);
  put(list, models.map((model) => card(model, server.models.filter((each) => each.root === model.id).map((each) => each.id))));
  if (attribute) {
    const button = list.querySelector(`[data-${attribute}="${CSS.escape(focused[attribute])}"]`);
    (button?.disabled ? button.closest("footer").querySelector("button:not(:disabled)") : button)?.focus();
  }
}

export async function refresh() {
  [activity] = await Promise.all([get("activity"), server.refreshModels(), server.refreshHealth()]);
  draw();
}

