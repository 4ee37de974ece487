// Colours of servers, experts and heat. Numbers are always shown beside them.
import { S } from "./state.js";

const LIGHT = ["#3d5bd9", "#c96f0a", "#1d8763", "#b83a76", "#6b53c0", "#87740c", "#0d7f9e", "#a3483a"];
const DARK = ["#8fa6ff", "#f2a950", "#55c79c", "#f083b4", "#b09cff", "#d6c04f", "#5fc3de", "#f0907f"];

export function isDark() {
  return S.theme === "dark" || (S.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

export function serverColour(server) {
  const colours = isDark() ? DARK : LIGHT;
  return server < 0 ? "#888888" : colours[server % colours.length];
}

export function expertColour(expert) {
  const hue = (expert * 137.508) % 360;
  const step = [0, 12, -8][Math.floor(expert / 7) % 3]; // neighbours in hue differ in lightness
  return isDark() ? `hsl(${hue} 70% ${68 + step}%)` : `hsl(${hue} 65% ${42 - step}%)`;
}

// From 0 to 1: the page's empty cell to its strongest colour.
export function heatColour(share) {
  const [from, to] = isDark() ? [[33, 38, 46], [157, 180, 255]] : [[236, 239, 246], [44, 70, 190]];
  const x = Math.min(1, Math.max(0, share));
  return `rgb(${from.map((low, i) => Math.round(low + (to[i] - low) * x)).join(" ")})`;
}
