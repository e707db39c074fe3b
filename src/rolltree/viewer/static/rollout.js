// One rollout: what was said, what was paid, where the time went, and what broke.

import { count, duration, folded, h, href, num, plainTable, put, reward } from "./dom.js";
import { markdown } from "./markdown.js";

export async function render(root, params, api) {
  const { run, id, index } = params;
  const found = await api.rollout(run, id, index);
  const row = found.row ?? found.rollout ?? found;
  const calls = found.calls ?? found.timing?.calls ?? [];
  const tokens = (call, at) => href(["run", run, "tokens", id, index, call], { at });
  const number = Number(index);
  const facts = [
    ["reward", reward(row.reward)],
    ["advantage", row.advantage === undefined || row.advantage === null ? h("span", { class: "muted" }, "not recorded") : num(row.advantage, true)],
    ["ended by", row.error_type ? h("span", { class: "bad" }, row.error_type) : row.truncated ? h("span", { class: "warn" }, `cut: ${row.truncation_reason ?? "truncated"}`) : row.stop_condition ?? row.finish_reason ?? "–"],
    ["phase", `${row.phase ?? "–"}${row.train_step === null || row.train_step === undefined ? "" : `, step ${row.train_step}`}`],
    ["environment", [row.env_id, row.task].filter(Boolean).join(" · ") || "–"],
    ["example", typeof row.example_id === "object" ? JSON.stringify(row.example_id) : row.example_id],
    ["agent", row.agent || null],
    ["calls", count(row.num_calls ?? calls.length)],
    ["tokens", `${count(row.num_prompt_tokens)} prompt, ${count(row.num_completion_tokens)} sampled`],
    ["versions", row.min_version === null || row.min_version === undefined ? null : row.min_version === row.max_version ? row.min_version : `${row.min_version} to ${row.max_version}`],
  ].filter(([, value]) => value !== null && value !== undefined);
  const functions = Object.entries(found.rewards ?? row.metrics ?? {});
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Rollout"),
      h("a", { class: "button", href: tokens(0) }, "Tokens"),
      h("a", { class: "button", href: href(["run", run, "tree", id, index]) }, "Tree"),
      row.group_id && h("a", { class: "button", href: href(["run", run, "group", row.group_id]) }, "Group"),
      number > 0 && h("a", { class: "button", "data-previous": true, href: href(["run", run, "rollout", id, number - 1]) }, "←"),
      number + 1 < (row.num_trajectories ?? 1) && h("a", { class: "button", "data-next": true, href: href(["run", run, "rollout", id, number + 1]) }, "→")),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    (found.errors ?? []).map(failure),
    functions.length > 0 && section("Rewards by function", plainTable(["function", "value"], functions.map(([name, value]) => [name, num(value)]), [1])),
    section("Conversation", h("div", { class: "conversation" }, (found.conversation ?? found.messages ?? []).map((each) => message(each, tokens)))),
    steps(found.steps, tokens),
    timing(calls, tokens),
    breaks(found.breaks, tokens),
    Object.keys(found.input ?? {}).length > 0 && h("details", null, h("summary", null, "Dataset row"), h("pre", null, JSON.stringify(found.input, null, 2))));
}

const section = (title, ...parts) => h("section", null, h("h2", null, title), parts);

function failure(error) {
  const text = error.traceback ?? error.tb;
  return h("section", { class: "failure", role: "alert" },
    h("p", null, h("b", null, error.type ?? error.error_type ?? error.kind ?? "Error"), error.phase && h("span", { class: "muted" }, ` in ${error.phase}`)),
    h("p", { class: "said" }, folded(error.message ?? "", 2000)),
    text && h("details", { "data-row": true }, h("summary", null, "Traceback"), h("pre", null, folded(text, 8000))));
}

/** One message of the conversation, with its reasoning and its tool calls. */
function message(each, tokens) {
  const reasoning = each.reasoning_content ?? each.reasoning;
  return h("article", { class: `message ${each.role ?? "other"}`, "data-row": true },
    h("header", null, h("b", null, each.role), each.name && h("span", { class: "muted" }, ` ${each.name}`), each.agent && h("span", { class: "muted" }, ` ${each.agent}`),
      each.call !== undefined && each.call !== null && h("a", { class: "small", href: tokens(each.call) }, `call ${each.call}`)),
    reasoning && h("details", { class: "reasoning" }, h("summary", null, `reasoning, ${count(reasoning.length)} characters`), folded(reasoning)),
    content(each.content),
    (each.tool_calls ?? []).map((call) => h("div", { class: "toolcall" },
      h("b", null, call.function?.name ?? call.name ?? "tool"), h("pre", null, folded(pretty(call.function?.arguments ?? call.arguments), 2000)))));
}

const THINKING = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

function content(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value !== "string") {
    return (Array.isArray(value) ? value : [value]).map((part) => typeof part?.text === "string" ? content(part.text) : h("pre", null, folded(JSON.stringify(part, null, 2), 1000)));
  }
  const thought = THINKING.exec(value);
  const rest = thought ? value.slice(thought[0].length) : value;
  return [
    thought && h("details", { class: "reasoning" }, h("summary", null, `reasoning, ${count(thought[1].length)} characters`), folded(thought[1])),
    markdown(rest) ?? folded(rest),
  ];
}

function pretty(value) {
  if (typeof value !== "string") return JSON.stringify(value ?? {}, null, 2);
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}

function steps(list, tokens) {
  if (!list?.length) return null;
  return section("Steps", plainTable(["call", "agent", "turn", "reward", "advantage", "prompt", "new", "sampled", "mean logprob", "finish"],
    list.map((each, at) => [h("a", { href: tokens(each.call ?? at) }, each.call ?? at), each.agent ?? "", each.turn ?? "–", num(each.reward), num(each.advantage, true),
      count(each.num_prompt_tokens), count(each.num_new_tokens), count(each.num_completion_tokens), num(each.mean_logprob), each.finish_reason ?? "–"]), [3, 4, 5, 6, 7, 8]));
}

/** When each call was sent, how long it waited in the queue, and how long it took itself. */
function timing(calls, tokens) {
  const known = calls.filter((each) => each.time_ms !== null && each.time_ms !== undefined);
  if (!known.length) return null;
  const end = Math.max(...known.map((each) => (each.sent_ms ?? 0) + each.time_ms), 1);
  const total = known.reduce((sum, each) => sum + each.time_ms, 0);
  return section("Time", h("p", { class: "muted small" }, `${duration(total / 1000)} in model calls of ${duration(end / 1000)}; `, h("i", { class: "swatch wait" }), " waiting for the server, ", h("i", { class: "swatch own" }), " the call itself"),
    h("div", { class: "timeline" }, known.map((each, at) => {
      const wait = Math.min(each.wait_ms ?? 0, each.time_ms);
      const share = (value) => `${(100 * value) / end}%`;
      return h("a", { class: "span", href: tokens(each.call ?? at), title: `call ${each.call ?? at}: ${duration(each.time_ms / 1000)}, ${duration(wait / 1000)} of it waiting` },
        h("span", { class: "name" }, `call ${each.call ?? at}`),
        h("span", { class: "lane" }, h("i", { class: "wait", vars: { left: share(each.sent_ms ?? 0), width: share(wait) } }),
          h("i", { class: "own", vars: { left: share((each.sent_ms ?? 0) + wait), width: share(each.time_ms - wait) } })),
        h("span", { class: "number" }, duration(each.time_ms / 1000)));
    })));
}

function breaks(list, tokens) {
  if (!list) return null;
  if (!list.length) return section("Breaks", h("p", { class: "muted" }, "None: every prompt continues the call before it."));
  return section("Breaks", list.map((each) => breakCard(each, tokens(each.call, each.position))));
}

/** A broken prefix: where, why, and what stood there before beside what stands there now. */
export function breakCard(each, address) {
  const before = each.previous_text ?? (each.previous_ids ?? []).join(" ");
  const now = each.current_text ?? (each.current_ids ?? []).join(" ");
  let same = 0;
  while (same < Math.min(before.length, now.length) && before[same] === now[same]) same += 1;
  const side = (title, text, kind) => h("div", { class: `card ${kind}` }, h("div", { class: "muted small" }, title),
    h("p", { class: "said" }, h("span", { class: "same" }, text.slice(0, same)), h("mark", null, text.slice(same) || "∅")));
  return h("section", { class: "break", "data-row": true },
    h("p", null, h("a", { href: address }, h("b", null, String(each.cause ?? "break").replaceAll("_", " "))),
      h("span", { class: "muted" }, ` call ${each.call}${each.previous_call === null || each.previous_call === undefined ? "" : ` after call ${each.previous_call}`}, ${count(each.position)} tokens agree`)),
    h("div", { class: "sides" }, side(`before, call ${each.previous_call ?? "–"}`, before, "old"), side(`now, call ${each.call}`, now, "new")));
}
