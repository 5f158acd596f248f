// An answer's Markdown as elements. What a model writes is hostile: HTML in it is shown as text, and what the renderer
// makes passes a sanitiser that keeps no form, no image, no style and no address but of the web and of mail.

import { copyButton, element } from "./elements.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre strong sub sup table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // The language goes through the sanitiser as a title.
    code: ({ text, lang }) => `<pre title="${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}</code></pre>`,
    html: ({ text }) => escaped(text),
    // Loaded from elsewhere it would tell others what is read here.
    image: ({ href, text }) => escaped(`[image: ${text || href}]`),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** Shows growing Markdown in an element: a block that has not changed keeps its elements, and what is selected in it. */
export class MarkdownView {
  #parent;
  #blocks = []; // { key, element }

  constructor(parent) {
    this.#parent = parent;
  }

  /** Shows JSON as such. */
  showJson(text) {
    this.#parent.replaceChildren(codeBlock(text, "json"));
    this.#blocks = [];
  }

  /** Shows `text`, all of it so far. */
  show(text) {
    const lexed = marked.lexer(text);
    const { links } = lexed;
    const tokens = lexed.filter((token) => token.type !== "space" && token.type !== "def");
    tokens.forEach((token, index) => {
      // The target of a link may come behind it.
      const key = `${Object.keys(links).length} ${token.raw}`;
      const shown = this.#blocks[index];
      if (shown?.key === key) return;
      const drawn = block(token, links);
      if (shown) shown.element.replaceWith(drawn);
      else this.#parent.append(drawn);
      this.#blocks[index] = { key, element: drawn };
    });
    for (const { element: left } of this.#blocks.splice(tokens.length)) left.remove();
  }
}

function block(token, links) {
  const drawn = document.createElement("div");
  drawn.append(DOMPurify.sanitize(marked.parser(Object.assign([token], { links })), ALLOWED));
  for (const pre of drawn.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre.textContent, pre.title));
  return drawn;
}

/** Code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const drawn = document.createElement("div");
  drawn.className = "code";
  const bar = element(drawn, "div", "bar");
  element(bar, "span", "language", language || "code");
  copyButton(bar, "Copy code", () => text);
  const pre = element(drawn, "pre");
  pre.tabIndex = 0;
  element(pre, "code", "", text);
  return drawn;
}
