// The experts of every layer as a grid: how much each computes, or which servers hold it.
import { heatColour, serverColour } from "./colours.js";
import { html } from "./html.js";
import { S, update } from "./state.js";

const MODES = { load: "Load", placement: "Placement" };

export function HeatMap() {
  const { load, processes, model } = S.live.parts;
  if (!load || !S.live.heat) {
    return html`<div class="panel"><h2>Experts</h2><p class="empty-line">
      ${processes ? "No load was reported yet." : !model.layers.length ? "This server does not say which experts compute." : `${model.experts} experts in each of ${model.layers.length} layers, computed by the worker itself. Their load is counted by expert servers.`}
    </p></div>`;
  }
  const holders = S.heat.mode === "placement" ? holdersOf(processes, load) : null;
  const top = Math.max(...S.live.heat.map((row) => Math.max(...row)));
  return html`<div class="panel">
    <div class="panel-head"><h2>Experts by layer</h2>
      <span class="segments" role="group" aria-label="What the grid shows">
        ${Object.entries(MODES).map(([mode, label]) => html`<button aria-pressed=${S.heat.mode === mode} onClick=${() => show(mode)}>${label}</button>`)}
      </span>
    </div>
    <div class="heat">
      <span class="axis-y" aria-hidden="true"><span>layer ${load.layers[0]}</span><span>layer ${load.layers.at(-1)}</span></span>
      <canvas tabindex="0" role="img" aria-label="Experts by layer. The arrow keys choose one."
        ref=${(canvas) => canvas && draw(canvas, holders, top)} onMouseMove=${pointed}
        onMouseLeave=${() => choose(null)} onKeyDown=${moved}></canvas>
      <span class="axis-x" aria-hidden="true"><span>expert 0</span><span>expert ${load.pairs[0].length - 1}</span></span>
    </div>
    <p class="route" aria-live="polite">${described(load, processes)}</p>
    ${holders ? html`<${Servers} processes=${processes} />` : html`<p class="scale"><span>0</span><i aria-hidden="true"></i><span>${top.toFixed(1)} pairs/s</span></p>`}
  </div>`;
}

function Servers({ processes }) {
  const servers = processes.filter((one) => one.role === "expert server");
  return html`<ul class="legend">${servers.map(
    (one) => html`<li style=${{ "--token": serverColour(one.number) }}><i aria-hidden="true"></i>${one.name} <small>${one.stage}</small></li>`,
  )}</ul>`;
}

function draw(canvas, holders, top) {
  const heat = S.live.heat;
  const [layers, experts] = [heat.length, heat[0].length];
  const box = canvas.getBoundingClientRect();
  const height = Math.round(Math.min(22, Math.max(5, 320 / layers)) * layers);
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const ratio = devicePixelRatio;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  const [w, h] = [canvas.width / experts, canvas.height / layers];
  const gap = w > 6 * ratio ? Math.max(1, ratio) : 0;
  for (let layer = 0; layer < layers; layer++) {
    for (let expert = 0; expert < experts; expert++) {
      const [x, y] = [expert * w, layer * h];
      if (!holders) {
        pen.fillStyle = heatColour(top > 0 ? heat[layer][expert] / top : 0);
        pen.fillRect(x, y, w - gap, h - gap);
        continue;
      }
      const held = holders[layer][expert];
      (held.length ? held : [-1]).forEach((server, at, all) => {
        pen.fillStyle = serverColour(server);
        pen.fillRect(x + (at * (w - gap)) / all.length, y, (w - gap) / all.length, h - gap);
      });
    }
  }
  if (S.heat.cell) {
    const [layer, expert] = S.heat.cell;
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.lineWidth = 2 * ratio;
    pen.strokeRect(expert * w, layer * h, w - gap, h - gap);
  }
}

const ranges = new Map();

// "0-2, 5" -> [0, 1, 2, 5]
function numbers(text) {
  if (!ranges.has(text)) {
    const found = text.split(", ").filter(Boolean).flatMap((part) => {
      const [first, last = first] = part.split("-").map(Number);
      return Array.from({ length: last - first + 1 }, (_, more) => first + more);
    });
    ranges.set(text, found);
  }
  return ranges.get(text);
}

// [layers][experts] the numbers of the servers that hold each expert and serve now.
function holdersOf(processes, load) {
  const holders = load.pairs.map((row) => row.map(() => []));
  for (const one of processes) {
    if (one.stage !== "serving") continue;
    load.layers.forEach((layer, at) => {
      for (const expert of numbers(one.held[layer] ?? "")) holders[at][expert]?.push(one.number);
    });
  }
  return holders;
}

function described(load, processes) {
  if (!S.heat.cell) return "Point at an expert, or use the arrow keys.";
  const [layer, expert] = S.heat.cell;
  const held = holdersOf(processes, load)[layer]?.[expert] ?? [];
  const who = held.length ? `on ${held.length > 1 ? "servers" : "server"} ${held.join(" and ")}` : "on no server now";
  return `Layer ${load.layers[layer]}, expert ${expert}: ${S.live.heat[layer][expert].toFixed(1)} pairs/s, ${load.pairs[layer][expert]} so far, ${who}`;
}

function pointed({ target, offsetX, offsetY }) {
  const heat = S.live.heat;
  const box = target.getBoundingClientRect();
  const layer = Math.floor((offsetY / box.height) * heat.length);
  const expert = Math.floor((offsetX / box.width) * heat[0].length);
  if (heat[layer]?.[expert] !== undefined) choose([layer, expert]);
}

function moved(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const heat = S.live.heat;
  const [layer, expert] = S.heat.cell ?? [0, -1];
  const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
  choose([clamp(layer + step[0], heat.length), clamp(expert + step[1], heat[0].length)]);
}

function choose(cell) {
  S.heat.cell = cell;
  update();
}

function show(mode) {
  S.heat.mode = mode;
  update();
}
