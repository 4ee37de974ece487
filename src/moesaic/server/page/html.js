// Preact's elements from tagged templates.
import { h } from "./vendor/preact-11.2.0.mjs";
import htm from "./vendor/htm-3.1.1.mjs";

export const html = htm.bind(h);
