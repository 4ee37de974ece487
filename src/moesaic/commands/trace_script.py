"""The script of the page that shows a trace: a canvas with a row for each process."""

from __future__ import annotations

STYLE = """
canvas { display: block; width: 100%; cursor: grab; touch-action: none; }
.told { min-height: 24px; margin: 8px 0 0; color: var(--text); font-variant-numeric: tabular-nums; }
.keys { font-size: 13px; margin: 4px 0 0; }
"""
SCRIPT = r"""
const ROW = 18, GAP = 14, LEFT = 190, TOP = 26;
const canvas = document.getElementById("trace"), told = document.getElementById("told");
const rows = TRACE.rows, names = TRACE.names;
const end = Math.max(1, ...rows.flatMap((row) => row.spans.map((span) => span[1] + span[2])));
const begins = rows.flatMap((row) => row.spans.map((span) => span[1])).sort((a, b) => a - b);
const first = begins[Math.floor(begins.length / 100)] ?? 0;  // a worker's first event may be seconds earlier
let from = Math.max(0, first - (end - first) / 50), to = end, at = null, drag = null;
let y = TOP;
for (const row of rows) {
  row.y = y;
  row.depth = Math.max(1, ...row.spans.map((span) => span[3] + 1));
  y += row.depth * ROW + GAP;
}
const height = y;

function dark() { return matchMedia("(prefers-color-scheme: dark)").matches; }

function colour(name) {
  const layer = /^layer (\d+)$/.exec(names[name]);
  const hue = layer ? (layer[1] * 47) % 360 : (name * 137.5) % 360;
  const [saturation, light] = /wait|gate/.test(names[name]) ? [8, dark() ? 38 : 78] : [55, dark() ? 45 : 70];
  return `hsl(${hue} ${saturation}% ${light}%)`;
}

function time(us) {
  return us < 1000 ? `${us} µs` : us < 1e6 ? `${(us / 1000).toFixed(2)} ms` : `${(us / 1e6).toFixed(3)} s`;
}

function x(us) { return LEFT + ((us - from) / (to - from)) * (canvas.clientWidth - LEFT - 8); }

function draw() {
  const ratio = devicePixelRatio, wide = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = wide * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d"), look = getComputedStyle(document.body);
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  ticks(pen, wide, look);
  for (const row of rows) {
    pen.fillStyle = look.color;
    pen.textAlign = "left";
    pen.fillText(row.name, 0, row.y + 13, LEFT - 10);
    let last = [];
    for (const span of row.spans) {
      const [name, begin, long, depth] = span;
      if (begin + long < from || begin > to) continue;
      const left = Math.max(LEFT, x(begin));
      const right = Math.max(left + 0.6, Math.min(wide - 8, x(begin + long)));
      if (right - left < 1 && last[depth] > left) continue;
      last[depth] = right;
      pen.fillStyle = colour(name);
      pen.fillRect(left, row.y + depth * ROW, right - left, ROW - 2);
      if (at && at[0] === row && at[1] === span) {
        pen.strokeStyle = look.color;
        pen.lineWidth = 2;
        pen.strokeRect(left, row.y + depth * ROW, right - left, ROW - 2);
      }
      if (right - left > 7 * names[name].length + 6) {
        pen.fillStyle = dark() ? "#fff" : "#14181f";
        pen.fillText(names[name], left + 4, row.y + depth * ROW + 12);
      }
    }
  }
}

function ticks(pen, wide, look) {
  const rough = (to - from) / Math.max(2, (wide - LEFT) / 140), power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * [1, 2, 5, 10].find((factor) => factor * power >= rough));
  pen.textAlign = "center";
  for (let us = Math.ceil(from / step) * step; us <= to; us += step) {
    pen.fillStyle = look.color;
    pen.globalAlpha = 0.6;
    pen.fillText(time(us), Math.min(x(us), wide - 34), 12);
    pen.globalAlpha = 0.12;
    pen.fillRect(x(us), TOP - 8, 1, height);
    pen.globalAlpha = 1;
  }
}

function zoom(factor, middle) {
  const long = Math.min(end, Math.max(20, (to - from) * factor)), share = (middle - from) / (to - from);
  from = Math.max(0, Math.min(end - long, middle - share * long));
  to = from + long;
  draw();
}

function pan(us) {
  const long = to - from;
  from = Math.max(0, Math.min(end - long, from + us));
  to = from + long;
  draw();
}

function timeOf(event) {
  return from + ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 8)) * (to - from);
}

function tell() {
  if (!at) return;
  const [row, [name, begin, long, , more]] = at;
  const rest = Object.entries(more ?? {}).map(([key, value]) => `${key} ${value}`).join(", ");
  const what = `${row.name}: ${names[name]}, ${time(long)}, at ${time(begin)}`;
  told.textContent = rest ? `${what}; ${rest}` : what;
}

canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    pan(((event.deltaX || event.deltaY) / canvas.clientWidth) * (to - from));
  } else zoom(event.deltaY > 0 ? 1.25 : 0.8, timeOf(event));
  event.preventDefault();
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  drag = event.offsetX;
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointermove", (event) => {
  if (drag !== null) {
    pan(((drag - event.offsetX) / (canvas.clientWidth - LEFT)) * (to - from));
    drag = event.offsetX;
    return;
  }
  const us = timeOf(event), down = event.offsetY;
  const row = rows.find((one) => down >= one.y && down < one.y + one.depth * ROW);
  const depth = row && Math.floor((event.offsetY - row.y) / ROW), slack = (to - from) / canvas.clientWidth;
  const near = ([, begin, long]) => us >= begin - slack && us <= begin + long + slack;
  const inside = (one) => one[3] === depth && near(one);
  const span = row?.spans.find(inside);
  if (span) { at = [row, span]; tell(); draw(); }
});
canvas.addEventListener("keydown", (event) => {
  const middle = (from + to) / 2, acts = {
    "+": () => zoom(0.6, middle), "-": () => zoom(1.6, middle), "0": () => { from = 0; to = end; draw(); },
    ArrowLeft: () => pan((from - to) / 5), ArrowRight: () => pan((to - from) / 5),
    ArrowDown: () => go(1), ArrowUp: () => go(-1),
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
});

function go(step) {
  const all = rows.flatMap((row) => row.spans.map((span) => [row, span]));
  const now = at ? all.findIndex((one) => one[1] === at[1]) : -1;
  at = all[Math.max(0, Math.min(all.length - 1, now + step))] ?? null;
  if (!at) return;
  const [, [, begin, long]] = at;
  if (begin < from || begin + long > to) pan(begin - from - (to - from) / 4);
  tell();
  draw();
}

addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
"""
