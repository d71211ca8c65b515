// The view of the API, from /openapi.json: every address with what it takes and answers.
import { base, get } from "./api.js";
import { copyButton, h, put, t } from "./dom.js";

let schemas = {};

const resolved = (schema) => (schema?.$ref ? { ...schemas[schema.$ref.split("/").pop()], name: schema.$ref.split("/").pop() } : schema || {});
const options = (schema) => schema.anyOf || schema.oneOf;

/** A type in a few words. */
function typeOf(schema) {
  const found = resolved(schema);
  if (options(found)) return [...new Set(options(found).map(typeOf))].join(" | ");
  if (found.enum) return found.enum.map((each) => JSON.stringify(each)).join(" | ");
  if ("const" in found) return JSON.stringify(found.const);
  if (found.type === "array") return `[${typeOf(found.items)}, …]`;
  return found.name || found.type || "any";
}

function limits(schema) {
  const each = options(schema)?.map(resolved).find((one) => "minimum" in one || "maximum" in one) || schema;
  return [each.minimum !== undefined && `≥ ${each.minimum}`, each.exclusiveMinimum !== undefined && `> ${each.exclusiveMinimum}`,
    each.maximum !== undefined && `≤ ${each.maximum}`, schema.default !== undefined && `= ${JSON.stringify(schema.default)}`].filter(Boolean).join(", ");
}

/** The objects inside a type, however it is wrapped. */
function objectsOf(schema) {
  const found = resolved(schema);
  if (options(found)) return options(found).flatMap(objectsOf);
  if (found.type === "array") return objectsOf(found.items);
  return found.properties ? [found] : [];
}

function fields(schema) {
  return objectsOf(schema).map((found) => h("div", { class: "schema" }, found.description ? h("p", { class: "muted" }, found.description) : null,
    h("ul", {}, Object.entries(found.properties).map(([name, field]) => {
      const label = [h("code", {}, name), " ", h("span", { class: "type" }, typeOf(field)), found.required?.includes(name) ? h("em", {}, t("required")) : null,
        h("span", { class: "muted" }, ` ${limits(resolved(field))}`), field.description ? h("span", { class: "about" }, field.description) : null];
      if (!objectsOf(field).length) return h("li", {}, label);
      const inside = h("details", { ontoggle: () => inside.open && inside.children.length === 1 && inside.append(...fields(field)) }, h("summary", {}, label));
      return h("li", {}, inside);
    }))));
}

function example(path, method, body) {
  const lines = [`curl ${base()}${path}`];
  if (method !== (body ? "post" : "get")) lines.push(`-X ${method.toUpperCase()}`);
  const required = resolved(body).required || [];
  const values = { messages: [{ role: "user", content: "Hello" }], input: "Hello", prompt: "Hello", query: "Hello", documents: ["Hello"], tokens: [1, 2] };
  if (body) lines.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(Object.fromEntries([...new Set(["model", ...required])].map((name) => [name, values[name] ?? "…"])))}'`);
  return lines.join(" \\\n  ");
}

function operation(path, method, each) {
  const messages = each["x-messages"], answers = messages ? { WebSocket: { schema: messages.answered } } : each.responses["200"].content;
  const body = messages?.sent || each.requestBody?.content["application/json"].schema, curl = messages ? base().replace("http", "ws") + path : example(path, method, body);
  const draw = () => details.open && details.children.length === 1 && details.append(
    h("h3", {}, t("example")), h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}), copyButton(curl)), h("pre", { tabindex: 0 }, curl)),
    ...(body ? [h("h3", {}, t("request")), ...fields(body)] : []),
    ...Object.entries(answers).flatMap(([type, { schema }]) => [h("h3", {}, t(/stream|ndjson|Web/.test(type) ? "streamed" : "answer"), " ", h("span", { class: "muted" }, `${type} · ${typeOf(schema)}`)), ...fields(schema)]));
  const details = h("details", { class: "operation", id: each.operationId, ontoggle: draw },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, each.summary)));
  return details;
}

const list = h("div", { class: "operations" }), filter = h("input", { type: "search", placeholder: t("docsFilter"), "aria-label": t("docsFilter"), oninput: narrow });
const [before, after] = t("docsIntro", { document: "\0" }).split("\0");
export const view = h("section", { class: "page", "aria-label": t("api") },
  h("h1", {}, t("api")), h("p", {}, before, h("a", { href: "openapi.json" }, "/openapi.json"), after), filter, list);

function narrow() {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const each of list.children) each.hidden = !words.every((word) => each.firstChild.textContent.toLowerCase().includes(word));
}

async function load() {
  const { components, paths } = await get("openapi.json");
  schemas = components.schemas;
  const rank = ([path]) => (path.startsWith("/v1") ? 0 : path.startsWith("/api") ? 1 : 2);
  const sorted = Object.entries(paths).sort((one, other) => rank(one) - rank(other));
  put(list, sorted.flatMap(([path, methods]) => Object.entries(methods).map(([method, each]) => operation(path, method, each))));
  narrow();
}

/** Show an operation, if one is named: in the address /docs#NAME, too. */
export async function open(name = location.hash.slice(1)) {
  if (!list.querySelector(".operation")) await load().catch((error) => put(list, h("p", { class: "problem", role: "alert" }, error.message)));
  const named = document.getElementById(name);
  if (named?.matches(".operation")) { named.open = true; named.scrollIntoView(); }
}
