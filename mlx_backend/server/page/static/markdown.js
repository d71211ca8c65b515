// What a model writes, as elements: markdown by marked, through DOMPurify, code colours by highlight.js. HTML that a model
// writes is shown as text, and no picture is fetched: its address could carry what was said in the chat.
import { Marked } from "./marked.js";
import "./dompurify.js";
import { copyButton, h, t } from "./dom.js";

const purify = globalThis.DOMPurify;
const escape = (text) => text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true, breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  },
});
const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "input", "li", "ol",
    "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};

/** Colour a block of code, once the library is there; an unknown language stays as it is. */
async function colour(code, language) {
  const { default: library } = await import("./highlight.js");
  if (!library.getLanguage(language)) return;
  const { value } = library.highlight(code.textContent, { language });
  code.replaceChildren(purify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
}

function block(token, links, isLast) {
  const tokens = Object.assign([token], { links });
  const fragment = purify.sanitize(marked.parser(tokens), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": t("table") });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code"), language = /language-(\S+)/.exec(code?.className)?.[1] || "";
    const frame = h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language), copyButton(() => pre.textContent, t("copyCode"))));
    pre.replaceWith(frame);
    pre.tabIndex = 0;
    frame.append(pre);
    if (language && !isLast) colour(code, language);
  }
  return h("div", {}, fragment);
}

/** Shows a text that grows in an element: only the blocks that have changed are made anew. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text, isDone = true) {
    const tokens = marked.lexer(text);
    const wanted = tokens.filter((token) => token.type !== "space").map((token, index, all) => {
      const isLast = !isDone && index === all.length - 1;
      return { token, isLast, source: token.raw + (isLast ? "…" : "") };
    });
    let same = 0;
    while (same < wanted.length && wanted[same].source === this.shown[same]) same++;
    while (this.element.children.length > same) this.element.lastChild.remove();
    for (const { token, isLast } of wanted.slice(same)) this.element.append(block(token, tokens.links, isLast));
    this.shown = wanted.map(({ source }) => source);
  }
}
