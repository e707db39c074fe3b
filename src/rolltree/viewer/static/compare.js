// Two evaluations, paired by example: how far apart, whether that is noise, and what flipped.

import { folded, h, href, num, plainTable, put } from "./dom.js";
import { interval } from "./chart.js";

export async function render(root, params, api) {
  const found = await api.compare({ a: params.a, b: params.b });
  put(root, h("h1", null, "Comparison"), found.pairs.map((pair) => pairOf(pair, found, params)));
}

function pairOf(pair, found, params) {
  const measures = Object.entries(pair.measures);
  const confidence = found.confidence;
  return h("section", null,
    h("h2", null, pair.b, h("span", { class: "muted" }, " against "), pair.a),
    h("div", { class: "story" }, pair.sentences.map((text) => h("p", null, text))),
    plainTable(
      ["", pair.a, pair.b, "difference", `${num(100 * confidence)} % interval`, "", ""],
      measures.map(([name, each]) => measure(name, each)), [1, 2, 3]),
    h("h2", null, "Examples that changed"),
    h("p", null, `${pair.num_lost} pass with ${pair.a} and not with ${pair.b}, ${pair.num_won} the other way.`),
    pair.changes.slice(0, pair.shown.length).map((change, at) => changed(change, pair.shown[at], pair, params)),
    pair.changes.length > pair.shown.length && h("ul", { class: "members", "aria-label": "Other changes" },
      pair.changes.slice(pair.shown.length).map((change) => h("li", null, headOf(change)))));
}

function measure(name, each) {
  const gain = each.difference;
  const hasBounds = gain.low !== null && gain.low !== undefined;
  const size = Math.max(Math.abs(gain.mean), Math.abs(gain.low ?? 0), Math.abs(gain.high ?? 0)) || 1;
  return [
    h("b", null, name.replaceAll("_", " ")), num(each.before.mean), num(each.after.mean), num(gain.mean, true),
    hasBounds ? `[${num(gain.low, true)}, ${num(gain.high, true)}]` : "–",
    interval(gain.mean, hasBounds ? [gain.low, gain.high] : null, [-size, size], { zero: 0, label: `${name} ${num(gain.mean, true)}` }),
    each.verdict ?? "",
  ];
}

/** Which example it is, and how its reward changed. */
function headOf(change) {
  const kind = change.flip === "won" ? "good" : change.flip === "lost" ? "bad" : "zero";
  return [
    h("span", { class: `badge ${kind}` }, change.flip ?? "changed"), " ", h("b", null, [...new Set([change.example].flat())].join(" · ")), " ",
    h("span", { class: "muted" }, `${num(change.reward_a)} → ${num(change.reward_b)}`),
  ];
}

function changed(change, shown, pair, params) {
  const sides = shown.map((side, at) => h("div", { class: "card" },
    h("div", { class: "muted" }, at ? pair.b : pair.a, " · ",
      h("a", { href: href(["run", runOf(at ? params.b : params.a), "rollout", side.request_id, "0"]) }, "rollout")),
    side.answers.map((text) => h("p", { class: "said" }, folded(text, 1500)))));
  return h("details", { "data-row": true, open: change.flip === "lost" || change.flip === "won" }, h("summary", null, headOf(change)),
    h("p", { class: "said" }, folded(shown[0].question, 1500)), h("div", { class: "sides" }, sides));
}

/** The run of an arm's name, which may say a phase behind a colon. */
const runOf = (arm) => String(arm).split(":")[0];
