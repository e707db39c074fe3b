// The token tree to scale: a bar per run of tokens, as long as it is, as high as the calls that share it.

import { count, h, href, num, put, s } from "./dom.js";

const ROW = 22;
const AXIS = 20;

export async function render(root, params, api) {
  const { run, id, index } = params;
  const found = await api.tree(run, index === undefined ? { group: id } : { id, index });
  const segments = found.segments ?? [];
  if (!segments.length) {
    put(root, h("h1", null, "Tree"), h("p", { class: "muted" }, "No tokens were recorded."));
    return;
  }
  const laid = layOut(segments);
  const deepest = segments.reduce((most, each) => Math.max(most, each.start_depth + each.length), 1);
  const hottest = segments.reduce((most, each) => Math.max(most, each.calls), 1);
  const said = h("p", { class: "facts inspector", role: "status" }, h("span", { class: "muted" }, "Point at a branch; click it for its tokens."));
  const picture = h("div", { class: "picture" });

  function address(segment) {
    const [number, call, position] = segment.at;
    const member = found.members[number];
    return member ? href(["run", run, "tokens", member.request_id, member.trajectory_index, call], { at: position }) : null;
  }

  function draw() {
    const width = Math.max(280, picture.clientWidth || 1000);
    const height = laid.rows * ROW + AXIS;
    const x = (depth) => (depth / deepest) * (width - 2);
    const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => s("text", { class: "tick", x: Math.min(width - 2, x(share * deepest)), y: 12, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, count(share * deepest)));
    const bars = segments.map((segment, at) => {
      const place = laid.places[at];
      const w = Math.max(1, x(segment.length) - 1);
      const y = AXIS + place.row * ROW;
      const high = place.rows * ROW - 2;
      const given = segment.length - segment.sampled;
      const heat = Math.ceil((4 * segment.calls) / hottest);
      const text = `${count(segment.length)} tokens from ${count(segment.start_depth)}, ${count(segment.sampled)} of them sampled, in ${segment.calls} ${segment.calls === 1 ? "call" : "calls"}`;
      const length = (from, size) => x(size) > 12 + 8 * count(size).length &&
        s("text", { class: "inside", x: x(from) + 5, y: y + high / 2 + 4 }, count(size));
      const shape = [
        given > 0 && s("rect", { class: `segment given heat${heat}`, x: x(segment.start_depth), y, width: Math.max(1, x(given) - 1), height: high, rx: 2 }),
        given > 0 && length(segment.start_depth, given),
        segment.sampled > 0 && s("rect", { class: `segment sampled heat${heat}`, x: x(segment.start_depth + given), y, width: Math.max(1, x(segment.sampled) - 1), height: high, rx: 2 }),
        segment.sampled > 0 && length(segment.start_depth + given, segment.sampled),
      ];
      const link = address(segment);
      const group = link ? s("a", { href: link, "data-row": true, "aria-label": text }, shape) : s("g", null, shape);
      group.addEventListener("pointerover", () => put(said, text));
      group.addEventListener("focus", () => put(said, text));
      return group;
    });
    put(picture, s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Token tree" }, marks, bars));
  }

  put(root,
    h("div", { class: "bar" }, h("h1", null, "Tree"),
      index === undefined ? h("a", { class: "button", href: href(["run", run, "group", id]) }, "Group") : [
        h("a", { class: "button", href: href(["run", run, "rollout", id, index]) }, "Rollout"), h("a", { class: "button", href: href(["run", run, "tokens", id, index, 0]) }, "Tokens")]),
    h("p", null, "Each token is computed once and used ", h("b", null, `${num(found.reuse_factor)} times`), h("span", { class: "muted" }, `: ${count(found.num_calls)} calls, ${count(found.num_tokens)} tokens stored.`)),
    h("p", { class: "scale" }, h("span", { class: "tk sampled" }, "sampled"), h("span", { class: "tk environment" }, "given"), h("span", { class: "muted" }, "darker: in more calls")),
    said, picture);
  root.addEventListener("shown", () => new ResizeObserver(draw).observe(picture), { once: true });
}

/** A row for each leaf, in depth-first order; a segment is as high as the leaves below it. */
function layOut(segments) {
  const children = segments.map(() => []);
  const tops = [];
  segments.forEach((segment, at) => (segment.parent < 0 ? tops : children[segment.parent]).push(at));
  const places = segments.map(() => null);
  let rows = 0;
  const stack = tops.reverse().map((at) => [at, false]);
  while (stack.length) {
    const [at, isDone] = stack.pop();
    if (isDone) {
      places[at].rows = Math.max(1, rows - places[at].row);
      continue;
    }
    places[at] = { row: rows, rows: 1 };
    stack.push([at, true]);
    if (!children[at].length) rows += 1;
    for (const child of [...children[at]].reverse()) stack.push([child, false]);
  }
  return { places, rows };
}
