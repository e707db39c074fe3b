// The shell: routes addresses to views, and handles keys and the theme.

import { apiFor, follow } from "./api.js";
import { h, href, keep, kept, line, put, visible } from "./dom.js";
import { file, partsOf } from "./stored.js";
import { listOf } from "./walk.js";
import * as compare from "./compare.js";
import * as evaluation from "./evaluation.js";
import * as group from "./group.js";
import * as rollout from "./rollout.js";
import * as rollouts from "./rollouts.js";
import * as run from "./run.js";
import * as runs from "./runs.js";
import * as tokens from "./tokens.js";
import * as tree from "./tree.js";

const ROUTES = [
  ["", runs],
  ["compare", compare],
  ["run/:run", run],
  ["run/:run/rollouts", rollouts],
  ["run/:run/evaluation/:phase", evaluation],
  ["run/:run/group/:id", group],
  ["run/:run/rollout/:id/:index", rollout],
  ["run/:run/tokens/:id/:index/:call", tokens],
  ["run/:run/tree/:id/:index", tree],
  ["run/:run/tree/:id", tree],
];

const KEYS = [
  ["j, k", "next and previous row"],
  ["Enter", "open the row"],
  ["x", "choose the row (runs)"],
  ["/", "search or filter"],
  ["f", "find a text in rollouts"],
  ["u", "one level up"],
  ["[, ]", "previous and next call, rollout or page"],
  ["t", "light or dark"],
  ["Esc", "leave a field, reset the zoom"],
  ["?", "these keys"],
];

const root = document.getElementById("view");
const trail = document.getElementById("trail");
const dialog = document.getElementById("keys");
const notice = document.getElementById("notice");
let current = null;

/** Return the route of an address with its parameters, or null. */
function match(hash) {
  const parts = partsOf(hash);
  const params = Object.fromEntries(new URLSearchParams(hash.split("?")[1] ?? ""));
  for (const [path, view] of ROUTES) {
    const names = path ? path.split("/") : [];
    if (names.length !== parts.length) continue;
    if (!names.every((name, at) => name.startsWith(":") || name === parts[at])) continue;
    names.forEach((name, at) => {
      if (name.startsWith(":")) params[name.slice(1)] = parts[at];
    });
    return { view, params };
  }
  return null;
}

/** Draw the links above the view. */
function drawTrail({ run: name, id }) {
  const sep = () => h("span", { class: "sep", "aria-hidden": "true" }, "/");
  put(trail, name !== undefined && [sep(), h("a", { href: href(["run", name]) }, name === "." ? "run" : name)],
    id !== undefined && [sep(), h("span", null, id)]);
}

async function show() {
  current?.abort();
  const controller = new AbortController();
  current = controller;
  const place = history.state;
  delete document.body.dataset.ready;
  if (dialog.open) dialog.close();
  put(document.getElementById("live"));
  const found = match(location.hash || "#/");
  if (!found) {
    put(trail);
    document.title = "rolltree";
    put(root, h("p", { class: "error" }, "There is no such page. ", h("a", { href: "#/" }, "All runs")));
    document.body.dataset.ready = location.hash;
    return;
  }
  drawTrail(found.params);
  document.title = line(visible(["rolltree", found.params.run, found.params.id].filter(Boolean).join(" · ")), 200);
  const page = h("div", { class: "page" });
  const wait = setTimeout(() => put(root, h("p", { class: "muted" }, "Reading …")), 150);
  const api = apiFor(controller.signal);
  performance.mark("view-begin");
  try {
    await found.view.render(page, found.params, api);
  } catch (error) {
    if (controller.signal.aborted) return;
    put(page, h("p", { class: "error", role: "alert" }, error.message));
    if (isAway()) follow(api, null, api.changedRuns, show); // drawn as soon as the server answers
  } finally {
    clearTimeout(wait);
  }
  if (controller.signal.aborted) return;
  put(root, page);
  goTo(place);
  page.dispatchEvent(new Event("shown"));
  performance.measure("view", "view-begin");
  if (!document.activeElement || document.activeElement === document.body) root.focus({ preventScroll: true });
  document.body.dataset.ready = location.hash || "#/";
}

/** Restore the reader's place in a view; an address that is gone back to has one, a new one does not. */
function goTo(place) {
  scrollTo(0, place?.y ?? 0);
  const table = root.querySelector("[data-virtual]");
  if (table && place?.table) table.scrollTop = place.table;
}

let saving = 0;
function savePlace() {
  clearTimeout(saving);
  const address = location.hash;
  saving = setTimeout(() => {
    if (location.hash !== address || document.body.dataset.ready === undefined) return;
    history.replaceState({ y: scrollY, table: root.querySelector("[data-virtual]")?.scrollTop ?? 0 }, "");
  }, 150);
}

const NOTICES = {
  gone: ["The server does not answer. This view stays; the page continues when the server is back. ",
    "Start it again with ", h("code", null, "rolltree view --port "), location.port, " and open its link."],
  token: ["The server was restarted. ",
    "Open the link that it printed, in this tab or another one: this page then continues."],
};

const isAway = () => notice.dataset.state in NOTICES;

/** Show that the server cannot be reached, once per change. */
function say(state) {
  if (notice.dataset.state === state) return;
  notice.dataset.state = state;
  put(notice, NOTICES[state] ?? "");
}

/** Move the marked row; a virtual table moves on its own. */
function move(by) {
  const virtual = root.querySelector("[data-virtual]");
  if (virtual) {
    virtual.dispatchEvent(new CustomEvent("move", { detail: by }));
    return;
  }
  const rows = [...root.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  const at = rows.findIndex((row) => row.classList.contains("marked"));
  const isSeen = (row) => row.getBoundingClientRect().bottom > 60 && row.getBoundingClientRect().top < innerHeight;
  const seen = at < 0 || !isSeen(rows[at]) ? rows.findIndex(isSeen) : -1; // does not jump to a row out of sight
  const next = rows[seen >= 0 ? seen : Math.max(0, Math.min(rows.length - 1, at + by))];
  if (!next) return;
  rows[at]?.classList.remove("marked");
  next.classList.add("marked");
  next.scrollIntoView({ block: "nearest" });
}

function openMarked() {
  const row = root.querySelector(".marked");
  const link = row?.matches("a, button") ? row : row?.querySelector("a, button, summary");
  link?.click();
}

function goUp() {
  const params = match(location.hash)?.params ?? {};
  if (params.call !== undefined) location.hash = href(["run", params.run, "rollout", params.id, params.index]);
  else if (params.id !== undefined) location.hash = listOf(params.run);
  else if (/\/(rollouts|evaluation\/.*)(\?|$)/.test(location.hash)) location.hash = href(["run", params.run]);
  else location.hash = "#/";
}

function toggleTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = keep("theme", isDark ? "light" : "dark");
}

function showKeys() {
  put(dialog, h("h2", null, "Keys"),
    h("dl", null, KEYS.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}

function enter(selector) {
  const field = root.querySelector(selector);
  field?.focus();
  field?.select?.();
}

const ACTIONS = {
  j: () => move(1),
  k: () => move(-1),
  Enter: openMarked,
  u: goUp,
  t: toggleTheme,
  "?": showKeys,
  x: () => root.querySelector(".marked input[type=checkbox]")?.click(),
  "/": () => enter("[data-search]"),
  f: () => enter("[data-find]"),
  "[": () => root.querySelector("[data-previous]")?.click(),
  "]": () => root.querySelector("[data-next]")?.click(),
  Escape: () => root.querySelector("[data-reset]")?.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  const isField = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (isField) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

if (kept("theme")) document.documentElement.dataset.theme = kept("theme");
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("help").addEventListener("click", showKeys);
document.addEventListener("reached", (event) => say(event.detail));
document.addEventListener("scroll", savePlace, { capture: true, passive: true });
history.scrollRestoration = "manual";
addEventListener("hashchange", show);
if (file && !location.hash) location.replace(href(["run", file.run]));
else show();
