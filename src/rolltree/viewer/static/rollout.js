// One rollout: what was said, what was paid, where the time went, and what broke.

import { count, duration, folded, h, href, num, plainTable, put, reward } from "./dom.js";
import { markdown } from "./markdown.js";

export async function render(root, params, api) {
  const { run, id, index } = params;
  marked = 0;
  const found = await api.rollout(run, id, index);
  const row = found.rollout;
  const tokens = (call, at) => href(["run", run, "tokens", id, index, call], { at });
  const other = (by) => found.others.find((each) => each.trajectory_index === row.trajectory_index + by) &&
    h("a", { class: "button", [by < 0 ? "data-previous" : "data-next"]: true, "aria-label": "Another rollout of this request", href: href(["run", run, "rollout", id, row.trajectory_index + by]) }, by < 0 ? "←" : "→");
  const broken = breaks(found.breaks, tokens);
  const facts = [
    ["reward", reward(row.reward)],
    ["ended by", row.error_type ? h("span", { class: "bad" }, row.error_type) : row.truncated ? h("span", { class: "warn" }, `cut: ${row.truncation_reason ?? "truncated"}`) : row.stop_condition ?? row.finish_reason ?? "–"],
    ["phase", `${row.phase ?? "–"}${row.train_step === null || row.train_step === undefined ? "" : `, step ${row.train_step}`}`],
    ["environment", [row.env_id, row.task].filter(Boolean).join(" · ") || "–"],
    ["example", row.example_id],
    ["agent", row.agent || null],
    ["calls", count(row.num_calls)],
    ["tokens", `${count(row.num_prompt_tokens)} prompt, ${count(row.num_completion_tokens)} sampled`],
    ["breaks", found.breaks.length ? h("button", { type: "button", class: "sort", onclick: () => broken.scrollIntoView() },
      h("b", { class: "warn" }, count(found.breaks.length))) : row.num_calls > 1 ? "0" : null],
    ["versions", row.min_version === null || row.min_version === undefined ? null : row.min_version === row.max_version ? row.min_version : `${row.min_version} to ${row.max_version}`],
  ].filter(([, value]) => value !== null && value !== undefined);
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Rollout"),
      h("a", { class: "button", href: tokens(0) }, "Tokens"),
      h("a", { class: "button", href: href(["run", run, "tree", id, index]) }, "Tree"),
      row.group_id && h("a", { class: "button", href: href(["run", run, "group", row.group_id]) }, "Group"),
      other(-1), other(1)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    found.errors.map(failure),
    found.tool_errors.map(failure),
    h("div", { class: "reading" },
      h("div", null, section("Conversation", h("div", { class: "conversation" },
        found.messages.length ? found.messages.map((each) => message(each, tokens))
          : h("p", { class: "muted" }, "No message was stored.")))),
      h("aside", null, paid(found.rewards, row), timing(found, tokens))),
    broken,
    steps(found.calls, tokens),
    Object.keys(found.input).length > 0 && h("details", null, h("summary", null, "Dataset row"),
      h("pre", null, folded(JSON.stringify(found.input, null, 2), 20_000))));
}

const section = (title, ...parts) => h("section", null, h("h2", null, title), parts);

/** What adds up to the reward, and the metrics beside it. */
function paid({ functions, rest, metrics, is_recorded: isRecorded }, row) {
  const others = Object.entries(metrics);
  const isSplit = functions.length > 0 || (isRecorded && row.reward !== null);
  const parts = functions.map((each) => [each.name, num(each.value), num(each.weight), num(each.contribution, true)]);
  if (rest) parts.push([h("i", null, "not by a function: the world, the form of answers"), "", "", num(rest, true)]);
  if (row.reward !== null) parts.push([h("b", null, "reward"), "", "", h("b", null, num(row.reward))]);
  return [
    isSplit && section("Reward by function",
      plainTable(["reward function", "value", "weight", "contribution"], parts, [1, 2, 3])),
    others.length > 0 && section("Metrics",
      !isRecorded && h("p", { class: "muted small" }, "Weights not recorded: which of these were rewarded, this run does not say."),
      plainTable(["metric", "value"], others.map(([name, value]) => [name, num(value)]), [1])),
  ];
}

function failure(error) {
  const text = error.traceback;
  return h("section", { class: "failure", role: "alert" },
    h("p", null, h("b", null, error.type || "Error"), h("span", { class: "muted" }, error.tool ? ` raised by the tool ${error.tool}; the model was told` : error.phase ? ` in ${error.phase}` : "")),
    h("p", { class: "said" }, folded(error.message ?? "", 2000)),
    text && h("details", { "data-row": true }, h("summary", null, "Traceback"), h("pre", null, folded(text, 8000))));
}

const ROLES = ["system", "user", "assistant", "tool"];

/** One message of the conversation, with its reasoning and its tool calls. */
function message(each, tokens) {
  const { reasoning } = each;
  const role = ROLES.includes(each.role) ? each.role : "other"; // a class of the model's choice could hide it
  return h("article", { class: `message ${role}`, "data-row": true },
    h("header", null, h("b", null, each.role), each.name && h("span", { class: "muted" }, ` ${each.name}`), each.call !== null && h("a", { class: "small", href: tokens(each.call) }, `call ${each.call}`)),
    reasoning && h("details", { class: "reasoning" }, h("summary", null, `reasoning, ${count(reasoning.length)} characters`), folded(reasoning)),
    content(each.content),
    each.tool_calls.map((call) => h("div", { class: "toolcall" },
      h("b", null, call.name || "tool"), h("pre", null, folded(pretty(call.arguments), 2000)))));
}

const MAX_PRETTY = 8000;
const MAX_MARKED = 400_000;
let marked = 0; // characters of this view that were read as markdown
const THINKING = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

function content(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value !== "string") {
    return (Array.isArray(value) ? value : [value]).map((part) => typeof part?.text === "string" ? content(part.text) : h("pre", null, folded(JSON.stringify(part, null, 2), 1000)));
  }
  const thought = THINKING.exec(value);
  const rest = thought ? value.slice(thought[0].length) : value;
  marked += rest.length;
  return [
    thought && h("details", { class: "reasoning" }, h("summary", null, `reasoning, ${count(thought[1].length)} characters`), folded(thought[1])),
    (marked < MAX_MARKED ? markdown(rest) : null) ?? folded(rest),
  ];
}

function pretty(value) {
  if (value.length > MAX_PRETTY) return value; // deep JSON grows with the square of its depth
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}

/** The calls; a column that no call has a value for is left out. */
function steps(list, tokens) {
  if (!list.length) return null;
  const signed = (value) => num(value, true);
  const columns = [
    ["agent", "agent", String], ["turn", "turn", String], ["reward", "reward", num, true],
    ["advantage", "advantage", signed, true], ["prompt", "num_prompt_tokens", count, true],
    ["new", "num_new_tokens", count, true], ["sampled", "num_completion_tokens", count, true],
    ["mean logprob", "mean_logprob", num, true], ["finish", "finish_reason", String],
  ].filter(([, name]) => list.some((each) => (each[name] ?? "") !== ""));
  return section("Steps", plainTable(["call", ...columns.map(([title]) => title)],
    list.map((each) => [h("a", { href: tokens(each.call) }, each.call),
      ...columns.map(([, name, said]) => (each[name] ?? "") === "" ? "–" : said(each[name]))]),
    columns.flatMap(([, , , isNumber], at) => isNumber ? at + 1 : [])));
}

/** When each call was sent, how long it waited in the queue, and how long it took itself. */
function timing({ calls, timing: sums }, tokens) {
  const known = calls.filter((each) => each.time_ms !== null);
  if (!known.length) return null;
  const end = Math.max(...known.map((each) => (each.sent_ms ?? 0) + each.time_ms), 1);
  const seconds = (value) => value === null ? "–" : duration(value / 1000);
  return section("Time", h("p", { class: "muted small" }, `${seconds(sums.generation_ms)} of playing: ${seconds(sums.server_ms)} waiting for answers, ${seconds(sums.own_ms)} environment and tools; ${seconds(sums.scoring_ms)} of scoring. `, h("i", { class: "swatch wait" }), " queue and retries ", h("i", { class: "swatch own" }), " the call"),
    h("div", { class: "timeline" }, known.map((each) => {
      const wait = Math.min(each.wait_ms ?? 0, each.time_ms);
      const share = (value) => `${(100 * value) / end}%`;
      return h("a", { class: "span", href: tokens(each.call), title: `call ${each.call}: ${duration(each.time_ms / 1000)}, ${duration(wait / 1000)} of it waiting` },
        h("span", { class: "name" }, `call ${each.call}`),
        h("span", { class: "lane" }, h("i", { class: "wait", vars: { left: share(each.sent_ms ?? 0), width: share(wait) } }),
          h("i", { class: "own", vars: { left: share((each.sent_ms ?? 0) + wait), width: share(each.time_ms - wait) } })),
        h("span", { class: "number" }, duration(each.time_ms / 1000)));
    })));
}

function breaks(list, tokens) {
  if (!list.length) return section("Breaks", h("p", { class: "muted" }, "None: every prompt continues the call before it."));
  return section("Breaks", list.map((each) => breakCard(each, tokens(each.call, each.position))));
}

/** A broken prefix: where, why, and what stood there before beside what stands there now. */
export function breakCard(each, address) {
  const isText = each.common_text !== null && each.common_text !== undefined;
  const shared = isText ? each.common_text : each.previous_ids.slice(0, each.num_common).map((id) => `${id} `).join("");
  const side = (title, text, ids, kind) => h("div", { class: `card ${kind}` }, h("div", { class: "muted small" }, title),
    h("p", { class: "said" }, h("span", { class: "same" }, shared), h("mark", null, (isText ? text : ids.slice(each.num_common).join(" ")) || "∅")));
  return h("section", { class: "break", "data-row": true },
    h("p", null, h("a", { href: address }, h("b", null, String(each.cause ?? "break").replaceAll("_", " "))),
      h("span", { class: "muted" }, ` call ${each.call}${each.previous_call === null || each.previous_call === undefined ? "" : ` after call ${each.previous_call}`}, ${count(each.position)} tokens agree`)),
    h("div", { class: "sides" }, side(`before, call ${each.previous_call ?? "–"}`, each.previous_after, each.previous_ids, "old"),
      side(`now, call ${each.call}`, each.current_after, each.current_ids, "new")));
}
