// The chat: earlier chats, messages, and the field to write in.
import { again, ask, giveResults, stop } from "./answering.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { markdown } from "./markdown.js";
import { newChat, openChat, S, save, update } from "./state.js";
import { colour, Colours, hasRoutes, TokenText } from "./tokens.js";

let top = 0; // where the messages were scrolled to
let height = 0; // of all messages then
let followed = true; // the newest text stays in sight until the reader scrolls up

export function Chat({ both }) {
  const chat = openChat();
  return html`<section class=${both ? "chat narrow" : "chat"} aria-label="Chat">
    <${Chats} />
    <div class="talk">
      <div class="talkbar">
        <button class="icon only-narrow" aria-label="Earlier chats" aria-expanded=${S.drawer} onClick=${toggleDrawer}>
          <${Icon} name="list" />
        </button>
        <${Colours} />
        <button class="icon only-narrow" aria-label="New chat" title="New chat" onClick=${fresh}>
          <${Icon} name="plus" />
        </button>
      </div>
      <div class="scroll" tabindex="0" role="log" aria-label="Messages" ref=${(box) => follow(box)} onScroll=${scrolled}>
        ${chat?.messages.length
          ? html`<ol class="messages">${chat.messages.map((one, at) => html`<${Message} key=${at} chat=${chat} one=${one} at=${at} />`)}</ol>`
          : html`<${Empty} />`}
      </div>
      <${Composer} />
    </div>
  </section>`;
}

function Chats() {
  return html`<aside class=${S.drawer ? "chats open" : "chats"} aria-label="Earlier chats">
    <button class="wide-button" onClick=${fresh}><${Icon} name="plus" />New chat</button>
    <ul>
      ${S.chats.filter((one) => one.messages.length).map(
        (one) => html`<li key=${one.id} class=${one.id === S.chat ? "current" : ""}>
          <button class="title" aria-current=${one.id === S.chat ? "true" : undefined} onClick=${() => pick(one)}>
            ${one.title}
          </button>
          <button class="icon small" aria-label=${`Delete the chat ${one.title}`} onClick=${() => remove(one)}>
            <${Icon} name="trash" />
          </button>
        </li>`,
      )}
    </ul>
    <p class="hint">Chats are kept in this browser alone.</p>
  </aside>
  ${S.drawer && html`<button class="shade" aria-label="Close the list of chats" onClick=${toggleDrawer}></button>`}`;
}

const IDEAS = ["Explain what a mixture of experts is.", "Natalia has 48 clips and sells half. How many are left?", "def main(argv):"];

function Empty() {
  return html`<div class="empty">
    <h1>Ask ${S.model ?? "the model"}</h1>
    <p>Answers arrive token by token.${hasRoutes() && " Switch on the colours above to see which expert or server computed each."}</p>
    <ul>${IDEAS.map((text) => html`<li><button onClick=${() => ask(text)}>${text}</button></li>`)}</ul>
  </div>`;
}

function Message({ chat, one, at }) {
  if (one.role === "user") return html`<li class="user"><span class="who">You</span><p>${one.content}</p></li>`;
  if (one.role === "tool") {
    return html`<li class="tool"><span class="who">Result of ${one.name}</span><pre>${one.content}</pre></li>`;
  }
  const running = S.running?.message === one;
  const last = at === chat.messages.length - 1;
  return html`<li class="assistant" aria-busy=${running}>
    <span class="who">${S.model}</span>
    ${one.reasoning && html`<details open=${running && !one.content}><summary>Reasoning</summary><p class="plain">${one.reasoning}</p></details>`}
    <div class="text"><${Text} one=${one} running=${running} /></div>
    ${one.calls?.length > 0 && html`<${Calls} chat=${chat} one=${one} open=${last && !running} />`}
    ${one.error && html`<p class="error" role="alert">${one.error}</p>`}
    <footer>
      <span>${figures(one, running)}</span>
      ${!running && one.content && html`<button class="link" onClick=${() => navigator.clipboard?.writeText(one.content)}>Copy</button>`}
      ${!running && last && html`<button class="link" onClick=${() => again(chat)}>${one.error ? "Try again" : "Another answer"}</button>`}
    </footer>
  </li>`;
}

function Text({ one, running }) {
  if (colour() !== "off" && one.pieces?.length) return html`<${TokenText} one=${one} running=${running} />`;
  return html`<div class=${running ? "markdown running" : "markdown"}>${markdown(one.content)}</div>
    ${colour() !== "off" && !running && one.content && html`<p class="hint">Colours were off while this answer arrived. The next answers have them.</p>`}`;
}

const ENDS = { length: "cut at the longest length", stopped: "stopped", error: "ended by an error", abort: "aborted" };

function figures(one, running) {
  if (running && !one.first) return "waiting for the first token";
  const parts = [];
  if (one.tokens) parts.push(`${one.tokens} tokens`);
  if (one.tokens > 1 && one.seconds > one.first) parts.push(`${((one.tokens - 1) / (one.seconds - one.first)).toFixed(1)} tokens/s`);
  if (one.first) parts.push(`first after ${one.first.toFixed(2)} s`);
  if (ENDS[one.end]) parts.push(ENDS[one.end]);
  return parts.join(" · ");
}

function Calls({ chat, one, open }) {
  const submit = (event) => {
    event.preventDefault();
    giveResults(chat, one, one.calls.map((_, index) => event.target.elements[`result-${index}`].value));
  };
  return html`<form class="calls" onSubmit=${submit}>
    ${one.calls.map(
      (call, index) => html`<div class="call">
        <code>${call.name}(${call.arguments})</code>
        ${open && html`<label for=${`result-${index}`}>Result of ${call.name}</label>
          <textarea id=${`result-${index}`} name=${`result-${index}`} rows="2" class="code"></textarea>`}
      </div>`,
    )}
    ${open && html`<button class="primary">Send the results</button>`}
  </form>`;
}

function Composer() {
  const running = S.running !== null;
  const submit = (event) => {
    event.preventDefault();
    followed = true;
    if (running) stop();
    else ask(S.draft);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <label class="hidden" for="message">Message</label>
    <textarea id="message" rows="1" placeholder=${`Message ${S.model ?? ""}`} value=${S.draft} ref=${(area) => grow(area)}
      onInput=${(event) => { S.draft = event.target.value; update(); }} onKeyDown=${pressed}></textarea>
    <button class=${running ? "round stop" : "round"} disabled=${!running && (!S.draft.trim() || !S.model)}
      aria-label=${running ? "Stop the answer" : "Send"} title=${running ? "Stop (Esc)" : "Send (Enter)"}>
      <${Icon} name=${running ? "stop" : "send"} />
    </button>
  </form>`;
}

function pressed(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!S.running) event.target.form.requestSubmit();
  } else if (event.key === "Escape") {
    stop();
  }
}

function grow(area) {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 200)}px`;
}

function follow(box) {
  if (box && followed) requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
}

function scrolled({ target }) {
  if (target.scrollTop < top - 4 && target.scrollHeight >= height) followed = false; // by the reader
  if (target.scrollHeight - target.scrollTop - target.clientHeight < 60) followed = true;
  top = target.scrollTop;
  height = target.scrollHeight;
}

function fresh() {
  newChat();
  S.drawer = false;
  followed = true;
  save();
  update();
  document.getElementById("message")?.focus();
}

function pick(chat) {
  S.chat = chat.id;
  S.drawer = false;
  followed = true;
  save();
  update();
}

function remove(chat) {
  if (S.running && chat.id === S.chat) stop();
  S.chats = S.chats.filter((one) => one !== chat);
  if (S.chat === chat.id) S.chat = null;
  save();
  update();
}

function toggleDrawer() {
  S.drawer = !S.drawer;
  update();
}
