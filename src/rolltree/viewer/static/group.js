// One group as one tree: what its rollouts share once, then where they part and what each was paid.

import { count, folded, h, href, num, put, reward } from "./dom.js";

const MAX_DRAWN = 300;

export async function render(root, params, api) {
  const { run, id } = params;
  const found = await api.group(run, id);
  const members = found.members ?? [];
  const segments = found.segments ?? [];
  const children = segments.map(() => []);
  const tops = [];
  segments.forEach((segment, at) => {
    (segment.parent === null || segment.parent === undefined || segment.parent < 0 ? tops : children[segment.parent]).push(at);
  });
  const leaves = segments.map(() => []);
  members.forEach((member, at) => leaves[member.path?.at(-1)]?.push(at));
  const scored = members.map((each) => each.reward).filter((value) => value !== null && value !== undefined);
  const low = Math.min(...scored);
  const high = Math.max(...scored);
  let drawn = 0;

  const membersOf = (segment) => segment.members ?? [];
  const mean = (list) => {
    const values = list.map((at) => members[at]?.reward).filter((value) => value !== null && value !== undefined);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };

  /** How a branch was paid beside its group: better, worse, or all alike. */
  function tone(list) {
    const value = mean(list);
    if (value === null || high === low) return "";
    const share = (value - low) / (high - low);
    return share > 0.66 ? "better" : share < 0.34 ? "worse" : "between";
  }

  function branch(at) {
    drawn += 1;
    const segment = segments[at];
    const list = membersOf(segment);
    const kids = children[at];
    const name = list.length === members.length ? `all ${members.length} rollouts` : list.length === 1 ? rolloutName(members[list[0]]) : `${list.length} rollouts`;
    const more = h("div", { class: kids.length > 1 ? "fork" : "" });
    const grow = () => put(more, kids.map(branch));
    if (drawn < MAX_DRAWN) grow();
    else if (kids.length) put(more, h("button", { type: "button", class: "more", onclick: grow }, "… the rest of this branch"));
    return h("div", { class: `branch ${tone(list)}` },
      h("div", { class: "branchhead" }, h("b", null, name), list.length > 1 && h("span", null, "mean ", num(mean(list))),
        h("span", { class: "muted" }, `${count(segment.num_tokens)} tokens from ${count(segment.start)}`)),
      said(segment),
      leaves[at].map((each) => ending(members[each])), more);
  }

  function said(segment) {
    const pieces = segment.pieces ?? (Array.isArray(segment.text) ? segment.text : null);
    if (pieces) return h("div", { class: "said" }, pieces.map((each) => h("span", { class: `by ${each.author}` }, folded(each.text, 1200))));
    const authors = [segment.authors ?? []].flat().map((each) => Array.isArray(each) ? each[0] : each);
    const author = authors.includes("model") ? "model" : "environment";
    const text = segment.text ?? (segment.ids ?? []).slice(0, 400).join(" ");
    return h("div", { class: "said" }, h("span", { class: `by ${author}` }, folded(text, 1200)));
  }

  const rolloutName = (member) => `rollout ${member.index_in_group ?? members.indexOf(member)}`;
  const address = (member) => href(["run", run, "rollout", member.request_id, member.trajectory_index ?? member.index ?? 0]);

  function ending(member) {
    return h("div", { class: "ending", "data-row": true },
      h("a", { href: address(member) }, rolloutName(member)), " ", reward(member.reward), " ",
      h("span", { class: "muted" }, "advantage "), advantage(member.advantage),
      member.error_type && h("span", { class: "bad" }, ` ${member.error_type}`),
      member.truncated && h("span", { class: "warn" }, " cut"), " ",
      h("a", { class: "small", href: href(["run", run, "tokens", member.request_id, member.trajectory_index ?? 0, Math.max(0, lastCall(member))]) }, "tokens"));
  }

  const order = [...members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  put(root, h("div", { class: "bar" }, h("h1", null, "Group"),
    h("span", { class: "muted" }, [found.example?.task, found.example?.example_id, found.phase, found.train_step !== null && found.train_step !== undefined && `step ${found.train_step}`]
      .filter((each) => each !== null && each !== undefined && each !== false && each !== "").map((each) => typeof each === "object" ? JSON.stringify(each) : each).join(" · ")),
    h("a", { class: "button", href: href(["run", run, "tree", id]) }, "Tree picture")),
    scored.length > 1 && low === high && h("p", { class: "sentence warning" }, "All rewards are equal, so this group teaches nothing."),
    h("ol", { class: "members", "aria-label": "Rewards" }, order.map((member) => h("li", null,
      h("a", { href: address(member) }, rolloutName(member)), " ", reward(member.reward), " ", advantage(member.advantage)))),
    found.note && h("p", { class: "muted" }, found.note),
    h("div", { class: "lens" }, tops.map(branch)));
}

const lastCall = (member) => (Array.isArray(member.calls) ? member.calls.length : member.num_calls ?? member.calls ?? 1) - 1;

function advantage(value) {
  if (value === null || value === undefined) return h("span", { class: "muted" }, "not recorded");
  return h("span", { class: value > 0 ? "good" : value < 0 ? "bad" : "muted" }, num(value, true));
}
