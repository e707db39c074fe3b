// One group as one tree: what its rollouts share once, then where they part and what each was paid.

import { count, folded, h, href, num, put, reward } from "./dom.js";

const MAX_DRAWN = 300;

const ALL = "*";

/** The group as it is asked for; where several agents play, the rollouts of the first: they were asked alike. */
async function read({ run, id, agent }, api) {
  const found = await api.group(run, id, agent === ALL ? null : agent);
  if (agent !== undefined || found.agents.length < 2) return { found, agent: agent ?? ALL };
  const [first] = found.agents;
  return { found: await api.group(run, id, first), agent: first };
}

/** A link per agent, and one to the tree of all. */
function agentsOf(found, agent, { run, id }) {
  if (found.agents.length < 2) return null;
  return h("p", { class: "bar" }, h("span", { class: "muted" }, "Several agents play here. The rollouts of"),
    [...found.agents, ALL].map((each) => h("a", { class: "button", "aria-current": each === agent ? "true" : null,
      href: href(["run", run, "group", id], { agent: each }) }, each === ALL ? "all" : each || "no agent")));
}

export async function render(root, params, api) {
  const { run, id } = params;
  const { found, agent } = await read(params, api);
  const members = found.members ?? [];
  const segments = found.segments ?? [];
  const children = segments.map(() => []);
  const tops = [];
  segments.forEach((segment, at) => (segment.parent < 0 ? tops : children[segment.parent]).push(at));
  const leaves = segments.map(() => []);
  members.forEach((member, at) => leaves[member.calls.findLast((call) => call.segment !== null)?.segment]?.push(at));
  const lost = members.filter((member) => !member.path.length);
  const scored = members.map((each) => each.reward).filter((value) => value !== null);
  const low = Math.min(...scored);
  const high = Math.max(...scored);
  let drawn = 0;

  /** How a branch was paid beside its group: better, worse, or all alike. */
  function tone(segment) {
    if (segment.reward === null || high === low || segment.members.length === members.length) return "";
    const share = (segment.reward - low) / (high - low);
    return share > 0.66 ? "better" : share < 0.34 ? "worse" : "between";
  }

  function branch(at) {
    drawn += 1;
    const segment = segments[at];
    const list = segment.members;
    const kids = children[at];
    const name = list.length === members.length ? `all ${members.length} rollouts` : list.length === 1 ? rolloutName(members[list[0]]) : `${list.length} rollouts`;
    const more = h("div", { class: kids.length > 1 ? "fork" : null });
    const grow = () => put(more, kids.map(branch));
    if (drawn < MAX_DRAWN) grow();
    else if (kids.length) put(more, h("button", { type: "button", class: "more", onclick: grow }, "… the rest of this branch"));
    const isPiece = segment.parent >= 0 && children[segment.parent].length === 1;
    const head = !isPiece && h("div", { class: "branchhead" }, h("b", null, name), list.length > 1 && h("span", null, "mean reward ", num(segment.reward)),
      segment.advantage !== null && h("span", null, "advantage ", advantage(segment.advantage)),
      h("span", { class: "muted" }, `from token ${count(segment.start)}`));
    return h("div", { class: isPiece ? "piece" : `branch ${tone(segment)}` }, head, said(segment), leaves[at].map((each) => ending(members[each])), more);
  }

  /** The text of a segment, what the model wrote on its own ground; ids where there is no tokenizer. */
  function said(segment) {
    let from = 0;
    const pieces = segment.pieces ?? segment.authors.map(([author, size]) => ({ author, text: segment.ids.slice(from, from += size).join(" ") }));
    return h("div", { class: "said", title: `${count(segment.num_tokens)} tokens` },
      pieces.map((each) => [h("span", { class: `by ${each.author}` }, folded(each.text, 1200)), segment.pieces ? null : " "]));
  }

  const rolloutName = (member) => `rollout ${member.index_in_group}${member.trajectory_index ? `.${member.trajectory_index}` : ""}${member.agent && agent === ALL ? ` · ${member.agent}` : ""}`;
  const address = (member) => href(["run", run, "rollout", member.request_id, member.trajectory_index]);

  function ending(member) {
    return h("div", { class: "ending", "data-row": true },
      h("a", { href: address(member) }, rolloutName(member)), " ", reward(member.reward), " ",
      member.advantage !== null && [h("span", { class: "muted" }, "advantage "), advantage(member.advantage)],
      member.error_type && h("span", { class: "bad" }, ` ${member.error_type}`),
      member.truncated && h("span", { class: "warn" }, " cut"), " ",
      h("a", { class: "small", href: href(["run", run, "tokens", member.request_id, member.trajectory_index, member.calls.at(-1)?.call ?? 0]) }, "tokens"));
  }

  const order = [...members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  put(root, h("div", { class: "bar" }, h("h1", null, "Group"),
    h("span", { class: "muted" }, [found.example.task, found.example.example_id, found.phase, found.train_step !== null && `step ${found.train_step}`].filter(Boolean).join(" · ")),
    h("a", { class: "button", href: href(["run", run, "tree", id]) }, "Tree picture")),
    agentsOf(found, agent, params),
    scored.length > 1 && low === high && h("p", { class: "sentence warning" }, "All rewards are equal, so this group teaches nothing."),
    h("ol", { class: "members", "aria-label": "Rewards" }, order.map((member) => h("li", null,
      h("a", { href: address(member) }, rolloutName(member)), " ", reward(member.reward), " ", member.advantage !== null && advantage(member.advantage)))),
    h("p", { class: "muted" }, `${count(found.shared_tokens)} tokens are shared by all; with the tree each token is computed once and used ${num(found.reuse_factor)} times.`,
      !found.is_trained && " Advantages were not recorded."),
    h("div", { class: "lens" }, tops.map(branch)),
    lost.map((member) => ending(member)));
  root.addEventListener("shown", () => {
    for (const each of root.querySelectorAll(".branch .said")) each.scrollTop = each.scrollHeight;
  }, { once: true });
}

function advantage(value) {
  return h("span", { class: value > 0 ? "good" : value < 0 ? "bad" : "muted" }, num(value, true));
}
