// The page: a header, the chat, and the live view.
import { render } from "./vendor/preact-11.2.0.mjs";
import { ApiError, call } from "./api.js";
import { Chat } from "./chat.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { Live } from "./live.js";
import { openSettings, Settings } from "./settings.js";
import { load, onUpdate, S, save, saveKeys, update } from "./state.js";
import { peek, watch } from "./watching.js";

const WIDE = matchMedia("(min-width: 1200px)");
const THEMES = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const VIEWS = { chat: "Chat", live: "Live", both: "Both" };

function App() {
  const view = S.view === "both" && !WIDE.matches ? "chat" : S.view;
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <${Header} view=${view} />
    ${S.needsKey ? html`<${KeyNeeded} />` : S.trouble && html`<p class="banner error" role="alert">${S.trouble}</p>`}
    <main id="main" class=${`view-${view}`}>
      ${view !== "live" && html`<${Chat} both=${view === "both"} />`}
      ${view !== "chat" && html`<${Live} />`}
    </main>
    <${Settings} />`;
}

function Header({ view }) {
  const shown = Object.keys(VIEWS).filter((name) => name !== "both" || WIDE.matches);
  return html`<header class="top">
    <span class="brand"><img src="page/icon.svg" alt="" width="22" height="22" />moesaic</span>
    <span class="model" title=${S.model ?? ""}>${S.model ?? "…"}</span>
    <nav aria-label="Views">
      ${shown.map(
        (name) => html`<button class="tab" aria-current=${view === name ? "page" : undefined}
          onClick=${() => show(name)}>${VIEWS[name]}</button>`,
      )}
    </nav>
    <span class="tools">
      <${Connection} />
      <button class="icon" aria-label=${THEMES[S.theme]} title=${THEMES[S.theme]} onClick=${nextTheme}>
        <${Icon} name=${S.theme} />
      </button>
      <button class="icon" aria-label="Settings" title="Settings" onClick=${openSettings}>
        <${Icon} name="settings" />
      </button>
    </span>
  </header>`;
}

function Connection() {
  const closed = S.needsKey ? "no key" : S.trouble ? "unreachable" : S.model ? "ready" : "connecting";
  const text = { open: "connected", opening: "connecting", closed }[S.live.state];
  return html`<span class=${`connection ${text.replace(" ", "-")}`} role="status"><i aria-hidden="true"></i><span>${text}</span></span>`;
}

function KeyNeeded() {
  const submit = (event) => {
    event.preventDefault();
    S.keys.api = event.target.elements.key.value.trim();
    saveKeys();
    start();
  };
  return html`<form class="banner" onSubmit=${submit}>
    <label for="key">This server needs its API key.</label>
    <input id="key" name="key" type="password" autocomplete="off" required />
    <button class="primary">Use it</button>
    ${S.trouble && html`<span class="error" role="alert">${S.trouble}</span>`}
  </form>`;
}

function show(view) {
  S.view = view;
  save();
  watch(view !== "chat");
  update();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  S.theme = names[(names.indexOf(S.theme) + 1) % names.length];
  save();
  applyTheme();
  update();
}

function applyTheme() {
  if (S.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = S.theme;
}

// Find out which model is served, and whether a key is needed.
async function start() {
  try {
    const models = await (await call("v1/models")).json();
    S.model = models.data[0].id;
    S.needsKey = S.noRoutes = false;
    S.trouble = null;
    watch(S.view !== "chat");
    if (S.view === "chat") peek().catch(() => {}); // a closed server tells nothing without the admin key
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    S.needsKey = error.status === 401;
    S.trouble = S.needsKey ? S.keys.api && "The server refused this key." : error.message;
    if (!S.needsKey) setTimeout(start, 2000);
  }
  update();
}

S.recheck = start;
load();
applyTheme();
onUpdate(() => render(html`<${App} />`, document.getElementById("app")));
document.getElementById("app").textContent = "";
WIDE.addEventListener("change", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
update();
start();
