// Markdown as elements, without links, images and HTML, so that text of models cannot load or run anything.

import { h } from "./dom.js";

const INLINE = /(?<!`)(`{1,3})(?!`)([^`]+)\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\n]+)\*/g;
const MAX_CHARACTERS = 60_000;

function inline(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(from, found.index));
    if (found[2] !== undefined) parts.push(h("code", null, found[2]));
    else if (found[3] !== undefined) parts.push(h("strong", null, found[3]));
    else parts.push(h("em", null, found[4]));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

/** The blocks of a text: headings, lists, quotes, code and paragraphs that keep their lines. */
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return null;
  const blocks = [];
  let lines = [];
  const close = () => {
    if (lines.length) blocks.push(h("p", { class: "text" }, inline(lines.join("\n"))));
    lines = [];
  };
  const all = text.split("\n");
  for (let at = 0; at < all.length; at += 1) {
    const fence = /^\s*(```+|~~~+)/.exec(all[at]);
    const heading = /^(#{1,6})[ \t]+(\S[^]*)?$/.exec(all[at]); // each of these patterns reads a line once
    const item = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(\S[^]*)?$/.exec(all[at]);
    if (fence) {
      close();
      const code = [];
      for (at += 1; at < all.length && !all[at].trim().startsWith(fence[1]); at += 1) code.push(all[at]);
      blocks.push(h("pre", null, code.join("\n")));
    } else if (heading) {
      close();
      blocks.push(h("p", { class: "heading" }, inline(heading[2] ?? "")));
    } else if (item) {
      close();
      const bullet = h("span", { class: "bullet" }, /\d/.test(item[2]) ? item[2] : "•");
      const depth = Math.min(6, item[1].length / 2);
      blocks.push(h("p", { class: "item", vars: { "--depth": depth } }, bullet, " ", inline(item[3] ?? "")));
    } else if (!all[at].trim()) close();
    else lines.push(all[at]);
  }
  close();
  return blocks;
}
