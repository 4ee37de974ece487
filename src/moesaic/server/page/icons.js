// Icons, drawn with the text's colour.
import { html } from "./html.js";

const PATHS = {
  auto: "M12 3a9 9 0 1 0 0 18V3z M12 3a9 9 0 0 1 0 18",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z M12 2v2 M12 20v2 M2 12h2 M20 12h2 M5 5l1.5 1.5 M17.5 17.5L19 19 M19 5l-1.5 1.5 M6.5 17.5L5 19",
  dark: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  settings: "M4 7h9 M17 7h3 M4 17h3 M11 17h9 M15 4.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4z M9 14.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4z",
  send: "M12 19V5 M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14 M5 12h14",
  minus: "M5 12h14",
  list: "M4 7h16 M4 12h16 M4 17h16",
  close: "M6 6l12 12 M18 6L6 18",
  trash: "M5 7h14 M10 7V5h4v2 M7 7l1 12h8l1-12",
  copy: "M9 9h10v10H9z M15 9V5H5v10h4",
};

export function Icon({ name }) {
  return html`<svg class="glyph" viewBox="0 0 24 24" width="18" height="18" fill="none" stroke="currentColor"
    stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}
