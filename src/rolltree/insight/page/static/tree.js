// The token tree to scale: a bar per run of tokens, as long as the run and as high as the branches below it.

import { button, count, h, href, muted, num, put, s } from "./dom.js";

const ROW = 22;
const AXIS = 20;

/** How often a token is used. */
export const times = (factor) => factor === 1 ? "once" : `${num(factor)} times`;

/** The indices of the segments without a parent, and of each segment's children. */
export function forest(segments) {
  const tops = [];
  const children = segments.map(() => []);
  segments.forEach(({ parent }, at) => (parent < 0 ? tops : children[parent]).push(at));
  return { children, tops };
}

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
  const said = h("p", { class: "facts inspector", role: "status" },
    muted("Point at a branch; click it for its tokens."));
  const picture = h("div", { class: "picture" });

  function address(segment) {
    const [number, call, at] = segment.at;
    const member = found.members[number];
    return member && href(["run", run, "tokens", member.request_id, member.trajectory_index, call], { at });
  }

  function draw() {
    const width = Math.max(280, picture.clientWidth || 1000);
    const height = laid.rows * ROW + AXIS;
    const x = (depth) => (depth / deepest) * (width - 2);
    const marks = ["start", "middle", "middle", "middle", "end"].map((anchor, at) =>
      s("text", { class: "tick", x: x((at / 4) * deepest), y: 12, "text-anchor": anchor }, count((at / 4) * deepest)));
    const bars = segments.map((segment, at) => {
      const { calls, length, sampled, start_depth: start } = segment;
      const place = laid.places[at];
      const y = AXIS + place.row * ROW;
      const high = place.rows * ROW - 2;
      const given = length - sampled;
      const heat = `${(100 * (Math.ceil((4 * calls) / hottest) - 1)) / 3}%`;
      const text = `${count(length)} tokens from ${count(start)}, ${count(sampled)} of them sampled, `
        + `in ${calls} ${calls === 1 ? "call" : "calls"}`;
      const part = (kind, from, size) => size > 0 && [
        s("rect", { class: `segment ${kind}`, vars: { "--heat": heat }, x: x(from), y, height: high, rx: 2,
          width: Math.max(1, x(size) - 1) }),
        x(size) > 12 + 8 * count(size).length &&
          s("text", { class: "inside", x: x(from) + 5, y: y + high / 2 + 4 }, count(size)),
      ];
      const link = address(segment);
      const tell = () => put(said, text);
      return s(link ? "a" : "g", {
        href: link, "data-row": Boolean(link), "aria-label": link && text, onpointerover: tell, onfocus: tell,
      }, part("given", start, given), part("sampled", start + given, sampled));
    });
    const view = { viewBox: `0 0 ${width} ${height}`, width, height };
    put(picture, s("svg", { ...view, role: "group", "aria-label": "Token tree" }, marks, bars));
  }

  put(root,
    h("div", { class: "bar" }, h("h1", null, "Tree"),
      index === undefined ? button("Group", href(["run", run, "group", id]))
        : [button("Rollout", href(["run", run, "rollout", id, index])),
          button("Tokens", href(["run", run, "tokens", id, index, 0]))]),
    h("p", null, "Each token is computed once and used ", h("b", null, times(found.reuse_factor)),
      muted(`: ${count(found.num_calls)} calls, ${count(found.num_tokens)} tokens stored.`)),
    h("p", { class: "scale" }, h("span", { class: "tk sampled" }, "sampled"),
      h("span", { class: "tk environment" }, "given"), muted("stronger: in more calls")),
    said, picture);
  root.addEventListener("shown", () => new ResizeObserver(draw).observe(picture), { once: true });
}

/** A row for each leaf, in depth-first order; a segment is as high as the leaves below it. */
function layOut(segments) {
  const { children, tops } = forest(segments);
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
