// One run: what the numbers say in sentences, the curves, the phases, the settings.

import { follow, markOf } from "./api.js";
import { board } from "./chart.js";
import {
  button, count, details, duration, factList, h, href, json, line, muted, num, plainTable, put, redraw, short, showLive,
} from "./dom.js";
import { failures, progress, stateBadge } from "./runs.js";
import { file } from "./stored.js";

const TOGETHER = [
  { title: "reward", names: ["reward/mean", "eval/reward"] },
  { title: "ended early", names: ["is_truncated/mean", "rollout/length_cut_share", "error/mean"] },
  { title: "trainer minus engine logprob", names: ["train/sampling/sampling_logp_difference/mean", "mismatch/mean"] },
  { title: "speed", names: ["rollout/tokens_per_s", "train/tokens_per_s"] },
  { title: "time", names: ["time/step", "time/wait_for_batch", "time/train_s"] },
];
const MOST_DRAWN = 120;
const FIRST = ["Reward", "Policy", "Engine against trainer", "Rollouts", "Speed"];

export async function render(root, params, api) {
  const { run } = params;
  const story = h("section", { class: "story", "aria-label": "What happened", "aria-busy": "true" },
    h("p", { class: "muted" }, "Reading the rollouts …"));
  const head = h("div");
  const rest = h("div");
  const curves = curvesOf(params);
  let again = null;
  put(root, file && h("p", { class: "muted small" }, `This file has ${count(file.num_rollouts)} of `,
    `${count(file.of)} rollouts, as of ${dateOf(file)}. The run itself opens with `,
    h("code", null, "rolltree view"), "."), head, story, curves.element, rest);

  async function draw() {
    const [summary, found] = await Promise.all([api.run(run), api.curves(run)]);
    if (api.signal.aborted) return summary;
    const { age_s: age, ...stored } = summary;
    redraw(head, stored, () => drawHead(head, summary, params));
    tell();
    curves.update(found);
    redraw(rest, [stored.phases, stored.notices, stored.config], () => drawRest(rest, summary, run));
    showLive(summary, api);
    return summary;
  }

  /** The story reads all rollouts: nothing waits for it, and it is asked for last. */
  async function tell() {
    clearTimeout(again);
    const told = await api.story(run).catch((error) => ({ error }));
    if (api.signal.aborted) return;
    const said = told.error?.message ?? told.sentences;
    redraw(story, said, () => told.error ? put(story, h("p", { class: "error", role: "alert" }, said))
      : drawStory(story, said, run));
    story.removeAttribute("aria-busy");
    if (told.again_s) again = setTimeout(tell, 1000 * told.again_s);
  }

  const summary = await draw();
  if (params.metric) root.addEventListener("shown", () => curves.element.scrollIntoView(), { once: true });
  follow(api, markOf(summary), () => api.changed(run), draw);
}

const dateOf = (record) => new Date(1000 * record.created_at).toLocaleString();

function drawHead(head, run, params) {
  const { reward } = run;
  const rollouts = (query) => href(["run", params.run, "rollouts"], query);
  const facts = [
    ["reward", reward ? [h("b", null, num(reward.mean)),
      muted(reward.low !== null && ` [${num(reward.low)}, ${num(reward.high)}]`, ` ${reward.of}`)] : "–"],
    ["progress", progress(run)],
    ["rollouts", h("a", { href: rollouts() }, count(run.num_rollouts))],
    ["failed", failures({ ...run, run: params.run })],
    ["sampled tokens", short(run.tokens?.sampled)],
    ["environment", (run.envs ?? []).join(", ") || "–"],
    ["model", run.model ?? "–"],
    ["last written", run.state === "running" ? "now" : `${duration(run.age_s)} ago`],
  ];
  put(head,
    h("div", { class: "bar" }, h("h1", null, run.name), stateBadge(run),
      button("Rollouts", rollouts()), button("Groups", rollouts({ by: "group" }))),
    run.error && h("p", { class: "error" }, line(run.error, 400)),
    run.state === "killed" && h("p", { class: "error" }, "The process that wrote this run is gone and did not say ",
      "why: it was killed, or the machine went down. What is stored is whole; the same command continues it."),
    factList(facts));
}

/** The address of what a sentence rests on. */
function evidenceLink(run, view, evidence) {
  const { phase, where, series, step, request_id: id, trajectory_index: index, call, position: at } = evidence;
  const [from, to] = evidence.steps ?? [];
  const [parts, query] = {
    groups: [["rollouts"], { by: "group", phase, step }],
    rollouts: [["rollouts"], { phase, where }],
    group: [["group", evidence.group_id]],
    rollout: [["rollout", id, index]],
    tree: [["tree", id, index]],
    tokens: [["tokens", id, index, call], { at }],
    curves: [[], { metric: series, from, to }],
  }[view];
  return href(["run", run, ...parts], query);
}

function drawStory(box, sentences, run) {
  if (!sentences?.length) return put(box, h("p", { class: "muted" }, "Nothing stands out."));
  const names = { curves: "the curve", rollout: "the rollout" };
  return put(box, sentences.map(({ evidence, severity, text }) => {
    const views = [evidence.view, evidence.view !== "curves" && evidence.series && "curves"].filter(Boolean);
    const link = (view) => [" ", h("a", { href: evidenceLink(run, view, evidence) }, `see ${names[view] ?? view}`)];
    return h("p", { class: `sentence ${severity}`, "data-row": true },
      h("span", { class: "hidden" }, `${severity}: `), text, views.map(link));
  }));
}

/** Curves that are read together are one chart, under the first one's place; the others have one each. */
function panelsOf(series) {
  const known = new Map(series.map((each) => [each.name, each]));
  return series.flatMap((each) => {
    const found = TOGETHER.find(({ names }) => names.includes(each.name));
    const members = found ? found.names.map((name) => known.get(name)).filter(Boolean) : [each];
    const title = members.length > 1 ? found.title : each.label;
    return members[0] === each ? [{ title, unit: each.unit, group: each.group, series: members }] : [];
  });
}

/** The curves with their search and zoom; `update` takes what a run has added, and moves nothing. */
function curvesOf(params) {
  const element = h("div");
  const readout = h("span", { class: "muted", role: "status" });
  const bar = h("div", { class: "bar" });
  const place = h("div");
  const missing = h("p", { class: "muted small" });
  const search = h("input", {
    type: "search", placeholder: "Find a curve (/)", "aria-label": "Find a curve", "data-search": true,
    value: params.metric, oninput: () => draw(),
  });
  const more = h("button", { type: "button", class: "quiet", onclick: () => {
    isWhole = true;
    draw();
  } });
  const onStep = (step) => { location.hash = href(["run", params.run, "rollouts"], { phase: "train", step }); };
  let data = { steps: [], series: [] };
  let drawn = null;
  let names = "";
  let isWhole = false;

  /** The panels that are looked for, or those that come first. */
  function chosen() {
    const all = panelsOf(data.series);
    const wanted = search.value.toLowerCase();
    const about = (panel) => [panel.title, panel.group, ...panel.series.flatMap((each) => [each.name, each.label])];
    if (wanted) return all.filter((panel) => about(panel).join(" ").toLowerCase().includes(wanted));
    const first = all.filter((panel) => FIRST.includes(panel.group));
    return isWhole || !first.length ? all : first;
  }

  function draw() {
    const found = chosen();
    const panels = found.slice(0, MOST_DRAWN);
    const said = JSON.stringify(panels.map((panel) => panel.series.map(({ name }) => name)));
    const others = data.series.length - found.flatMap((panel) => panel.series).length;
    if (drawn && said === names) drawn.update(data.steps, panels);
    else {
      const range = drawn?.range();
      drawn = board(data.steps, panels, { onStep, readout });
      if (range) drawn.zoom(range);
      names = said;
      put(place, drawn.element, found.length > MOST_DRAWN && h("p", { class: "muted" },
        `${count(found.length - MOST_DRAWN)} more are not drawn. Find them by their names above.`), more);
      const reset = bar.querySelector("[data-reset]");
      if (reset) reset.replaceWith(drawn.reset);
      else put(bar, h("h2", null, "Curves"), search, readout, drawn.reset);
    }
    put(more, `${count(others)} more curves`);
    more.hidden = others <= 0 || search.value !== "";
  }

  function update(found) {
    data = found;
    if (!data.steps.length || !data.series.length) return;
    const isNew = !drawn;
    draw();
    put(missing, data.missing?.length && `Not recorded: ${data.missing.map(({ label }) => label).join(", ")}.`);
    if (!isNew) return;
    put(element, bar, h("p", { class: "muted small" }, "Drag to zoom; click a step for its rollouts. ",
      data.steps.length > 200 && "Bold: the mean around each step."), place, missing);
    if (params.from !== undefined) drawn.zoom([Number(params.from) - 1, Number(params.to) + 1]);
  }

  return { element, update };
}

function drawRest(rest, run, name) {
  const link = (phase) => h("a", { href: href(["run", name, "rollouts"], { phase }) }, phase);
  const notices = run.notices ?? [];
  const counts = ["num_rollouts", "num_errors", "num_truncated", "num_prompt_tokens", "num_completion_tokens"];
  put(rest,
    h("h2", null, "Phases"),
    plainTable(["phase", "reward", "rollouts", "failed", "truncated", "prompt tokens", "sampled tokens"],
      (run.phases ?? []).map((each) =>
        [link(each.phase), num(each.mean_reward), ...counts.map((column) => count(each[column]))]), [1, 2, 3, 4, 5, 6]),
    h("details", { hidden: !notices.length }, h("summary", null, `${notices.length} notices`), // a place for the first
      plainTable(["when", "step", "kind", "what"], notices.map((each) =>
        [dateOf(each), each.step ?? "–", each.kind, line(JSON.stringify(each.data), 300)]))),
    details("Settings", json(run.config ?? {})));
}
