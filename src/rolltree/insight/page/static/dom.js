// Builds elements without HTML: text reaches the page only as text nodes, so text of models cannot run.

import { isInside } from "./stored.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (isNone(value) || value === false) continue;
    if (name === "href" && !isInside(value)) element.setAttribute("title", "not in this file");
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    } else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (!isNone(child) && child !== false) {
      element.appendChild(child instanceof Node ? child : document.createTextNode(visible(String(child))));
    }
  }
}

/** Whether a value is null or undefined. */
export const isNone = (value) => value === null || value === undefined;

/** An HTML element. `on...` attributes are listeners, `vars` sets style properties. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace the children of an element. */
export function put(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

const drawn = new WeakMap();
const CONTROLS = "a, button, input, select, summary, [tabindex]";

/**
 * Redraw a part of a live view if its data has changed. What was open, marked or focused stays so, and the
 * following parts do not move in front of the reader.
 */
export function redraw(box, data, draw) {
  const said = JSON.stringify(data);
  if (drawn.get(box) === said) return;
  drawn.set(box, said);
  const all = (selector) => [...box.querySelectorAll(selector)];
  const open = all("details").map((each) => each.open);
  const marked = all("[data-row]").findIndex((each) => each.classList.contains("marked"));
  const focused = all(CONTROLS).indexOf(document.activeElement);
  const next = box.nextElementSibling;
  const place = next?.getBoundingClientRect().top;
  draw();
  // Not at the top of the page, where the reader sees the new content.
  if (next && scrollY > 0 && place < innerHeight) scrollBy(0, next.getBoundingClientRect().top - place);
  all("details").forEach((each, at) => { each.open = open[at] ?? each.open; });
  all("[data-row]")[marked]?.classList.add("marked");
  all(CONTROLS)[focused]?.focus({ preventScroll: true });
}

/** Control, direction and invisible characters, as in Python's `untrusted.visible`; emoji selectors stay. */
const HIDDEN = new RegExp("[\\u0000-\\u0008"
  + "\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5"
  + "\\u180b-\\u180f\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ud800-\\udfff\\ufe00-\\ufe0d"
  + "\\ufeff\\uffa0\\ufff0-\\ufffb"
  + "\\u{13430}-\\u{1345f}\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]", "gu");
const TOWER = /(\p{M}{6})(\p{M}+)/gu;
const PLAIN = /^[\t\n -~]*$/; // matches nearly every text, and much faster

/** The text with control, direction and invisible characters shown, and without stacks of accents. */
export function visible(text) {
  if (PLAIN.test(text)) return text;
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, (found) => {
    const code = found.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  }).replace(TOWER, (_, kept, rest) => `${kept}⟨${[...rest].length} more marks⟩`);
}

/** The first characters of a text, without splitting a surrogate pair. */
function cut(text, limit) {
  const code = text.charCodeAt(limit - 1);
  return text.slice(0, code >= 0xd800 && code < 0xdc00 ? limit - 1 : limit);
}

/** The first characters of a text, with a button for the rest. */
export function folded(text, limit = 4000) {
  const value = String(text ?? "");
  if (value.length <= limit) return h("span", { class: "text" }, value);
  const begin = cut(value, limit);
  const whole = h("span", { class: "text" }, begin);
  let shown = begin.length;
  const more = h("button", { type: "button", class: "more" });
  const name = () => put(more, `… ${count(value.length - shown)} more characters`);
  more.addEventListener("click", () => {
    const next = cut(value.slice(shown), 20 * limit);
    whole.append(visible(next));
    shown += next.length;
    if (shown < value.length) name();
    else more.remove();
  });
  name();
  return h("span", null, whole, more);
}

/** A text as one line of at most `limit` characters. */
export function line(text, limit = 120) {
  const flat = String(text ?? "").slice(0, 4 * limit).replace(/\s+/g, " ").trim();
  return flat.length > limit ? `${cut(flat, limit - 1)}…` : flat;
}

const COMMAS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 }); // once, since it is slow

/** A whole number with commas. */
export const count = (value) => num(typeof value === "number" ? Math.round(value) : value);

/** A number with three significant digits or more. */
export function num(value, sign = false) {
  if (isNone(value) || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  const isTiny = size < 0.001 && size > 0;
  const text = isTiny || size >= 1e15 ? value.toExponential(2)
    : Number.isInteger(value) || size >= 100 ? COMMAS.format(value)
      : value.toFixed(size >= 10 ? 2 : 3);
  return (sign && value > 0 ? `+${text}` : text).replaceAll("-", "−");
}

/** A large number in short form: 5,176 is 5.2k. */
export function short(value) {
  if (isNone(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)}${unit}`;
  }
  return num(value);
}

/** Seconds, minutes, hours or days. */
export function duration(seconds) {
  if (isNone(seconds)) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

/** A link within the page, from path segments and a query. */
export function href(parts, query = {}) {
  return withQuery(`#/${parts.map(encodeURIComponent).join("/")}`, query);
}

/** A path with the parameters of a query that have a value. */
export function withQuery(path, query) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => !isNone(value) && value !== ""));
  return text.size ? `${path}?${text}` : path;
}

/** A link that looks like a button. */
export const button = (name, address, more) => h("a", { class: "button", href: address, ...more }, name);

/** A select element; `names` are pairs of value and name. */
export const select = (label, names, value, choose) => h("select", {
  "aria-label": label, onchange: ({ target }) => choose(target.value),
}, names.map(([each, name]) => h("option", { value: each, selected: each === value }, name)));

export const muted = (...children) => h("span", { class: "muted" }, children);

/** Content that opens below its title. */
export const details = (title, ...body) => h("details", null, h("summary", null, title), body);

/** A record as indented JSON. */
export const json = (value) => h("pre", null, folded(JSON.stringify(value, null, 2), 20_000));

/** Facts with their names; facts without a value are left out. */
export function factList(facts) {
  return h("dl", { class: "facts" }, facts.filter(([, value]) => !isNone(value)).map(([name, value]) =>
    h("div", null, h("dt", null, name), h("dd", null, value))));
}

/** Show in the page's head whether the run is in progress. */
export function showLive({ state }, { isExported }) {
  put(document.getElementById("live"), state === "running" && !isExported && "live");
}

/** The text that the browser keeps under a name, or null; a page from disk may have no storage. */
export function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text under a name, if the browser has storage; return the text. */
export function keep(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    // Without storage, the link or the choice is needed again next time.
  }
  return text;
}

/** A table of a few rows: heads are texts, cells are texts or elements. */
export function plainTable(heads, rows, numeric = []) {
  const side = (at) => (numeric.includes(at) ? "number" : null);
  const head = heads.map((name, at) => h("th", { class: side(at), scope: "col" }, name));
  const body = rows.map((row) => h("tr", null, row.map((cell, at) => h("td", { class: side(at) }, cell))));
  return h("div", { class: "scroll", tabindex: "0" },
    h("table", { class: "plain" }, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

/** A reward with a colour: the number, or "no reward". */
export function reward(value) {
  if (isNone(value)) return h("span", { class: "reward none" }, "no reward");
  const kind = value > 0 ? "good" : value < 0 ? "bad" : "zero";
  return h("span", { class: `reward ${kind}` }, num(value));
}
