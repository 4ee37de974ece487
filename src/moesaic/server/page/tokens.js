// Tokens in the colour of the server or the expert that computed them, in one layer.
import { expertColour, serverColour } from "./colours.js";
import { html } from "./html.js";
import { S, save, update } from "./state.js";

const MODES = { off: "Off", expert: "Experts", server: "Servers" };

const NO_ROUTES = "This server does not say which experts compute a token: the model is dense, or it was started with --fast-memory or --moe-collectives.";

// Whether the server says which experts compute a token. Its first event tells, or the refusal of a request.
export function hasRoutes() {
  return !S.noRoutes && S.live.parts.model?.layers.length !== 0;
}

// Whether tokens are coloured, and by what: the user's choice, where the server has it.
export function colour() {
  return hasRoutes() ? S.colour : "off";
}

let chosen = null; // { one, at }: the token whose route is spelled out

export function Colours() {
  const layers = S.live.parts.model?.layers ?? [];
  const [shown, offered] = [colour(), hasRoutes()];
  return html`<div class="colours" role="group" aria-label="Colour the tokens">
    <span class="label">Colours</span>
    <span class="segments">
      ${Object.entries(MODES).map(
        ([mode, label]) => html`<button aria-pressed=${shown === mode} disabled=${!offered} onClick=${() => choose(mode)}>${label}</button>`,
      )}
    </span>
    ${!offered && html`<small class="no-routes">${NO_ROUTES}</small>`}
    ${shown !== "off" && html`<label>Layer
      <select value=${S.layer} onChange=${(event) => pickLayer(Number(event.target.value))}>
        ${(layers.length ? layers : [S.layer]).map((layer, index) => html`<option value=${index}>${layer}</option>`)}
      </select>
    </label>`}
  </div>`;
}

export function TokenText({ one, running }) {
  const counts = new Map();
  const spans = one.pieces.map((piece, at) => {
    const found = computedBy(piece);
    if (found !== null) counts.set(found, (counts.get(found) ?? 0) + 1);
    const style = found === null ? {} : { "--token": colourOf(found) };
    const current = chosen?.one === one && chosen.at === at;
    return html`<span class=${current ? "token current" : "token"} style=${style} data-at=${at}>${piece.text}</span>`;
  });
  return html`<div class=${running ? "tokens running" : "tokens"} tabindex="0" role="group" aria-label="Tokens: the arrow keys choose one"
      onKeyDown=${(event) => moved(event, one)} onMouseOver=${(event) => pointed(event, one)}>${spans}</div>
    <${Legend} counts=${counts} total=${one.pieces.length} />
    <p class="route" aria-live="polite">${chosen?.one === one ? routeOf(one.pieces[chosen.at]) : "Point at a token, or use the arrow keys, to see its experts."}</p>`;
}

function Legend({ counts, total }) {
  if (!counts.size) {
    return html`<p class="hint">${S.colour === "server" ? "There are no expert servers: one process computed these tokens." : ""}</p>`;
  }
  const shown = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12);
  return html`<ul class="legend" aria-label="Share of tokens">
    ${shown.map(
      ([who, count]) => html`<li style=${{ "--token": colourOf(who) }}><i aria-hidden="true"></i>
        ${S.colour} ${who} <small>${Math.round((100 * count) / total)} %</small></li>`,
    )}
    ${counts.size > shown.length && html`<li>and ${counts.size - shown.length} more</li>`}
  </ul>`;
}

// The expert with the largest weight in the chosen layer, or the server that computed it.
function computedBy({ routes }) {
  const route = routes.at(-1);
  const layer = Math.min(S.layer, route.experts.length - 1);
  return (S.colour === "server" ? route.servers[layer] : route.experts[layer])?.[0] ?? null;
}

function colourOf(who) {
  return S.colour === "server" ? serverColour(who) : expertColour(who);
}

function routeOf({ text, routes }) {
  const route = routes.at(-1);
  const at = Math.min(S.layer, route.experts.length - 1);
  const layer = S.live.parts.model?.layers[at] ?? at;
  const who = route.experts[at].map((expert, slot) => {
    const server = route.servers[at]?.[slot];
    return server === undefined ? `expert ${expert}` : `expert ${expert} on server ${server}`;
  });
  return `“${text.replace(/\n/g, "↵")}”, layer ${layer}: ${who.join(", ")}`;
}

function moved(event, one) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = chosen?.one === one ? chosen.at + step : 0;
  chosen = { one, at: Math.max(0, Math.min(one.pieces.length - 1, at)) };
  update();
}

function pointed({ target }, one) {
  if (target.dataset.at === undefined) return;
  chosen = { one, at: Number(target.dataset.at) };
  update();
}

function choose(mode) {
  S.colour = mode;
  save();
  update();
}

function pickLayer(layer) {
  S.layer = layer;
  save();
  update();
}
