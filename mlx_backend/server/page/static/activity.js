// The view of what the server does: requests that run and wait, the memory, speeds of the last minutes, the last requests.
import { get, server } from "./api.js";
import { count, h, number, percent, put, seconds, svg, t, time } from "./dom.js";
import { memoryBar } from "./models.js";

const MINUTES = 15, WIDTH = 300, HEIGHT = 72;
const tiles = h("div", { class: "tiles" }), memory = h("div", { class: "memory" }), plots = h("div", { class: "plots" }), rows = h("tbody");
const columns = ["when", "request", "model", "effort", "prompt", "cachedShare", "answer", "first", "rate", "took", "outcome"];
const queue = []; // how many ran and waited, while this page was open

export const view = h("section", { class: "page", "aria-label": t("activity") },
  h("h1", {}, t("activity")), tiles, memory, plots, h("h2", {}, t("lastRequests")), h("p", { class: "muted" }, t("noContents")),
  h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": t("lastRequests") },
    h("table", {}, h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col" }, t(each))))), rows)));

/** A small plot of [seconds since 1970, value] over the last minutes. */
function plot(title, points, show, { line = false } = {}) {
  const now = Date.now() / 1000, from = now - 60 * MINUTES;
  const inside = points.filter(([at]) => at >= from).sort(([one], [other]) => one - other);
  const most = Math.max(...inside.map(([, value]) => value), 0), last = inside.at(-1)?.[1];
  const place = ([at, value]) => [((at - from) / (60 * MINUTES)) * WIDTH, HEIGHT - 4 - (most ? value / most : 0) * (HEIGHT - 12)];
  const marks = line ? [svg("polyline", { points: inside.map((each) => place(each).map((value) => value.toFixed(1)).join(",")).join(" ") })]
    : inside.map((each) => svg("path", { d: `M${place(each).map((value) => value.toFixed(1))}h0` }));
  const text = inside.length ? t("plotFact", { last: show(last), most: show(most) }) : t("nothingYet");
  return h("figure", {}, h("figcaption", {}, h("strong", {}, title), h("span", {}, text)),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${text}` },
      svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 4, y2: HEIGHT - 4 }), ...marks));
}

function row(each) {
  const isReply = each.completion_tokens !== undefined, share = each.prompt_tokens ? each.cached_tokens / each.prompt_tokens : null;
  const cells = [time(each.at), each.path, each.model, each.effort && t(each.effort), each.prompt_tokens && count(each.prompt_tokens), share === null ? null : percent(share || 0),
    isReply && count(each.completion_tokens), isReply && seconds(each.first_token_seconds), each.tokens_per_second && number(each.tokens_per_second), seconds(each.seconds), t(`outcome.${each.outcome}`)];
  return h("tr", { class: each.status >= 400 ? "failed" : null }, cells.map((value) => h("td", {}, value || "–")));
}

export async function refresh() {
  const [{ requests, memory: use }] = await Promise.all([get("activity"), server.refreshHealth()]);
  const models = server.health?.models || [], sum = (name, of) => of.reduce((total, each) => total + (each[name] || 0), 0);
  const running = sum("running", models), waiting = sum("waiting", models), now = Date.now() / 1000;
  queue.push([now, running + waiting]);
  while (queue[0][0] < now - 60 * MINUTES) queue.shift();
  const replies = requests.filter((each) => each.completion_tokens), prompt = sum("prompt_tokens", replies);
  const tile = (label, value) => h("div", { class: "tile" }, h("span", { class: "value" }, value), h("span", {}, label));
  put(tiles, tile(t("running"), count(running)), tile(t("inQueue"), count(waiting)),
    tile(t("cachedShare"), prompt ? percent(sum("cached_tokens", replies) / prompt) : "–"),
    tile(t("generated"), count(sum("completion_tokens", replies))));
  put(memory, memoryBar(use));
  const of = (value) => replies.map((each) => [each.at + each.seconds, value(each)]);
  put(plots, 
    plot(t("speed"), of((each) => each.tokens_per_second || 0), number),
    plot(t("first"), of((each) => each.first_token_seconds), seconds),
    plot(t("cachedShare"), of((each) => (each.prompt_tokens ? each.cached_tokens / each.prompt_tokens : 0)), percent),
    plot(t("runningAndWaiting"), queue, count, { line: true }));
  put(rows, (requests.length ? requests.slice(0, 50).map(row) : [h("tr", {}, h("td", { colspan: columns.length }, t("nothingYet")))]));
}
