// Markdown as elements. Nothing of a text is ever parsed as HTML: tags stay text, and images become links.
import { lexer } from "./vendor/marked-18.2.1.mjs";
import { html } from "./html.js";

const SAFE = /^(https?:|mailto:)/i;

export function markdown(text) {
  return blocks(lexer(text, { gfm: true, breaks: true }));
}

function blocks(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "space":
      case "def":
        return null;
      case "heading":
        return heading(token);
      case "paragraph":
        return html`<p>${inline(token.tokens)}</p>`;
      case "blockquote":
        return html`<blockquote>${blocks(token.tokens)}</blockquote>`;
      case "hr":
        return html`<hr />`;
      case "code":
        return html`<pre tabindex="0"><code>${token.text}</code></pre>`;
      case "list":
        return list(token);
      case "table":
        return table(token);
      case "text":
        return token.tokens ? inline(token.tokens) : unescaped(token.text);
      case "checkbox":
        return token.checked ? "☑ " : "☐ ";
      default:
        return html`<p>${token.raw}</p>`; // HTML among them
    }
  });
}

function heading({ depth, tokens }) {
  const Tag = `h${Math.min(6, depth + 2)}`;
  return html`<${Tag}>${inline(tokens)}<//>`;
}

function list({ ordered, start, items }) {
  const rows = items.map((item) => html`<li>${blocks(item.tokens)}</li>`);
  return ordered ? html`<ol start=${start || 1}>${rows}</ol>` : html`<ul>${rows}</ul>`;
}

function table({ header, rows }) {
  const head = header.map((cell) => html`<th>${inline(cell.tokens)}</th>`);
  const body = rows.map((row) => html`<tr>${row.map((cell) => html`<td>${inline(cell.tokens)}</td>`)}</tr>`);
  return html`<div class="wide"><table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table></div>`;
}

function inline(tokens) {
  return (tokens ?? []).map((token) => {
    switch (token.type) {
      case "strong":
        return html`<strong>${inline(token.tokens)}</strong>`;
      case "em":
        return html`<em>${inline(token.tokens)}</em>`;
      case "del":
        return html`<del>${inline(token.tokens)}</del>`;
      case "codespan":
        return html`<code>${token.text}</code>`;
      case "br":
        return html`<br />`;
      case "link":
      case "image":
        return link(token);
      case "escape":
        return token.text;
      case "text":
        return token.tokens ? inline(token.tokens) : unescaped(token.text);
      default:
        return token.raw;
    }
  });
}

function link({ href, text, tokens }) {
  const label = tokens ? inline(tokens) : text;
  return SAFE.test(href)
    ? html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${label}</a>`
    : label;
}

const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'" };

function unescaped(text) {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (found) => ENTITIES[found]);
}
