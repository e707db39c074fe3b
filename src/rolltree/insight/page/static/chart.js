// Curves in SVG: lines with their intervals, with one pointer and one zoom for all charts.

import { h, isNone, muted, num, put, s, short } from "./dom.js";

const SMALL = [420, 170];
const LARGE = [1200, 300];
const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
const DIGIT = 3.5; // half the width of a digit
const MOST = 5e307; // so that twice as much is finite

/** Round values that divide a range into about `wanted` parts. */
function ticks(low, high, wanted = 4) {
  const size = (high - low) / wanted;
  if (!(size > 0 && size < Infinity)) return [];
  const power = 10 ** Math.floor(Math.log10(size));
  const unit = [1, 2, 5, 10].find((each) => each * power >= size) * power;
  const first = Math.ceil(low / unit) * unit;
  const found = Array.from({ length: 2 * wanted + 1 }, (_, number) => first + number * unit);
  return found.filter((at) => at <= high + unit * 1e-9).map((at) => Math.abs(at) < unit * 1e-9 ? 0 : at);
}

const clipped = (value) => Math.max(-MOST, Math.min(MOST, value));

/** Logarithms of round values in a range of logarithms: powers of ten, and 2 and 5 times them if these are few. */
function powers(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    const units = high - low > 3 ? [1] : [1, 2, 5];
    found.push(...units.map((unit) => power + Math.log10(unit)).filter((at) => at >= low && at <= high));
  }
  const every = Math.ceil(found.length / 7);
  return found.filter((_, at) => at % every === 0);
}

/** Whether a line is level, so that its band would be a block that says less than the number does. */
function isLevel({ values, is_points: arePoints }) {
  const known = values.filter(Number.isFinite);
  return !arePoints && known.every((value) => value === known[0]);
}

/** The range of a chart's lines and intervals, with a margin. */
function limits(series, steps, range) {
  const isSeen = (value, at) => Number.isFinite(value) && steps[at] >= range[0] && steps[at] <= range[1];
  const lists = series.flatMap((each) => [each.values, each.low, each.high]);
  const seen = lists.flatMap((values) => values?.filter(isSeen).map(clipped) ?? []);
  if (!seen.length) return [0, 1];
  let low = seen.reduce((least, value) => Math.min(least, value));
  const high = seen.reduce((most, value) => Math.max(most, value));
  if (low >= 0 && low < 0.35 * high) low = 0;
  if (high - low <= 1e-6 * Math.abs(high)) { // values that differ only by rounding make a flat line
    const room = Math.abs(high) * 0.1 || 1;
    return low === 0 ? [0, room] : [low - room, high + room];
  }
  const room = 0.06 * (high - low);
  return [low === 0 ? 0 : low - room, high + room];
}

/** A line through points. null, a step without a value, interrupts only a line of neighbouring steps. */
function path(points) {
  const known = points.flatMap((point, at) => point ? [at] : []);
  // Judged by neighbours: values at every second step (`eval.every = 2`) are not a line with gaps.
  const isDense = known.filter((at, place) => place && at - known[place - 1] === 1).length > 0.5 * (known.length - 1);
  let isOpen = false;
  return points.map((point) => {
    if (!point) {
      if (isDense) isOpen = false;
      return "";
    }
    const command = isOpen ? "L" : "M";
    isOpen = true;
    return `${command}${point[0].toFixed(1)},${point[1].toFixed(1)}`;
  }).join("");
}

const MANY = 200;

/** The mean around each step of a long curve, over `window` steps; null if the step has no value. */
function smoothed(values, window) {
  const half = Math.floor(window / 2);
  return values.map((value, at) => {
    if (!Number.isFinite(value)) return null;
    const near = values.slice(Math.max(0, at - half), at + half + 1).filter(Number.isFinite);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

/**
 * A board of charts with one step axis. `panels` are {title, unit, series: [{label, values, low,
 * high}]}; `onStep(step)` is called when a step is clicked. Drag to zoom, double click to reset.
 */
export function board(begun, panels, { onStep, readout }) {
  let steps = begun;
  let isLog = false;
  const whole = () => [steps[0] ?? 0, steps.at(-1) ?? 1];
  let all = whole();
  let range = all;
  const logs = h("button", {
    type: "button", class: "quiet", "aria-pressed": "false", title: "Show curves above 0 on a logarithmic axis",
    onclick: () => {
      isLog = !isLog;
      logs.setAttribute("aria-pressed", isLog);
      for (const each of charts) each.draw();
    },
  }, "log axis");
  const reset = h("button", {
    type: "button", class: "quiet", hidden: true, "data-reset": true, onclick: () => zoom(all),
  }, "Whole run (Esc)");
  const charts = panels.map((panel) => chart(panel));
  const where = readout ?? h("span");

  function zoom(wanted) {
    range = wanted[1] > wanted[0] ? wanted : all;
    reset.hidden = range === all;
    for (const each of charts) each.draw();
  }

  function point(at) {
    put(where, at === null ? "" : `step ${steps[at]}`);
    for (const each of charts) each.point(at);
  }

  /** Replace the curves by longer ones of the same panels; zoom, pointer and focus stay. */
  function update(grown, longer) {
    steps = grown;
    const wasWhole = range === all;
    all = whole();
    if (wasWhole) range = all;
    charts.forEach((each, at) => each.update(longer[at]));
  }

  function chart(given) {
    let panel = given;
    let isLarge = Boolean(given.isLarge) && innerWidth > 900;
    let [width, height] = isLarge ? LARGE : SMALL;
    const now = panel.series.map((each) => `${each.label} ${num(last(each.values))}`);
    const plot = s("svg", {
      class: "plot", role: "img", tabindex: "0",
      "aria-label": `${panel.title}: ${now.join(", ")}`,
    });
    const values = panel.series.map(() => h("span", { class: "value" }));
    const legend = h("div", { class: "legend" }, panel.series.map((each, at) =>
      h("span", { class: `key c${at % 8}`, title: each.name },
        panel.series.length > 1 && [h("i", { class: "swatch" }), `${each.label} `], values[at])));
    const pointer = s("g");
    let from = null;
    let pointed = null;
    const x = (step) => LEFT + ((step - range[0]) / (range[1] - range[0] || 1)) * (width - LEFT - RIGHT);

    const shown = (value) => panel.unit === "bytes" ? short(value) : num(value);

    function say(at) {
      panel.series.forEach((each, number) => {
        const value = at === null ? last(each.values) : each.values[at];
        put(values[number], shown(value),
          !isNone(each.low?.[at]) && ` [${shown(each.low[at])}, ${shown(each.high[at])}]`);
      });
    }

    /** The series as logarithms if these are wanted and all values are above 0, else null. */
    function scaled() {
      const lists = panel.series.flatMap((each) => [each.values, each.low, each.high]).filter(Boolean);
      if (!isLog || lists.some((values) => values.some((value) => !isNone(value) && value <= 0))) return null;
      const log = (values) => values?.map((value) => isNone(value) ? null : Math.log10(value));
      return panel.series.map((each) => ({ values: log(each.values), low: log(each.low), high: log(each.high) }));
    }

    function draw() {
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const logarithms = scaled();
      const ranged = (logarithms ?? panel.series).map((each, at) =>
        isLevel(panel.series[at]) ? { values: each.values } : each);
      const [low, high] = limits(ranged, steps, range);
      const tall = height - TOP - BOTTOM;
      const place = (value) => TOP + (1 - (clipped(value) - low) / (high - low)) * tall;
      const y = (value) => place(logarithms ? Math.log10(value) : value);
      const parts = [];
      const marks = logarithms ? powers(low, high).map((at) => 10 ** at) : ticks(low, high);
      const names = logarithms ? marks.map((value) => num(Number(value.toPrecision(1)))) : axis(marks);
      marks.forEach((value, at) => {
        parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
        parts.push(s("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, names[at]));
      });
      for (const value of ticks(range[0], range[1], 5).filter(Number.isInteger)) {
        const at = Math.min(x(value), width - DIGIT * String(value).length);
        parts.push(s("text", { class: "tick", x: at, y: height - 6, "text-anchor": "middle" }, value));
      }
      const points = (list) => steps.map((step, at) =>
        step >= range[0] && step <= range[1] && Number.isFinite(list[at]) ? [x(step), y(list[at])] : null);
      panel.series.forEach((each, number) => {
        if (each.is_points) { // no line, since nothing is known between two evaluations
          points(each.values).forEach((point, at) => {
            if (!point) return;
            const [cx, cy] = point;
            const whisker = !isNone(each.low?.[at]) &&
              s("line", { x1: cx, x2: cx, y1: y(each.low[at]), y2: y(each.high[at]) });
            parts.push(s("g", { class: `point c${number % 8}` }, whisker, s("circle", { cx, cy, r: 4 })));
          });
          return;
        }
        if (each.low && each.high && !isLevel(each)) {
          const band = [...points(each.high).filter(Boolean), ...points(each.low).filter(Boolean).reverse()];
          if (band.length) parts.push(s("path", { class: `band c${number % 8}`, d: `${path(band)}Z` }));
        }
        const line = points(each.values);
        const found = line.filter(Boolean);
        const isLong = found.length > MANY;
        parts.push(s("path", { class: `line c${number % 8}${isLong ? " raw" : ""}`, d: path(line) }));
        if (isLong) {
          const mean = smoothed(each.values, Math.round(found.length / 50));
          parts.push(s("path", { class: `line c${number % 8}`, d: path(points(mean)) }));
        } else if (found.length < 40 || found.length < steps.length / 2) {
          for (const [cx, cy] of found) parts.push(s("circle", { class: `dot c${number % 8}`, cx, cy, r: 2 }));
        }
      });
      put(plot, parts, pointer);
      drawMarks(pointed, y);
      plot.toY = y;
    }

    function drawMarks(at, y) {
      if (at === null || steps[at] < range[0] || steps[at] > range[1]) return put(pointer);
      const cx = x(steps[at]);
      const dots = panel.series.map((each, number) => Number.isFinite(each.values[at]) &&
        s("circle", { class: `dot c${number % 8}`, cx, cy: y(each.values[at]), r: 3 }));
      return put(pointer, s("line", { class: "pointer", x1: cx, x2: cx, y1: TOP, y2: height - BOTTOM }), dots);
    }

    function nearest(event) {
      const box = plot.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * width;
      const step = range[0] + ((place - LEFT) / (width - LEFT - RIGHT)) * (range[1] - range[0]);
      return steps.reduce((best, each, at) => Math.abs(each - step) < Math.abs(steps[best] - step) ? at : best, 0);
    }

    plot.addEventListener("pointermove", (event) => {
      const at = nearest(event);
      point(at);
      if (from !== null && at !== from) {
        const [left, right] = [x(steps[from]), x(steps[at])].sort((a, b) => a - b);
        const tall = height - TOP - BOTTOM;
        pointer.append(s("rect", { class: "zoom", x: left, y: TOP, width: right - left, height: tall }));
      }
    });
    plot.addEventListener("pointerleave", () => point(null));
    plot.addEventListener("pointerdown", (event) => {
      from = nearest(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      const at = nearest(event);
      const begun = from;
      from = null;
      if (begun !== null && begun !== at) zoom([steps[begun], steps[at]].sort((a, b) => a - b));
      else if (begun !== null && event.detail < 2) onStep?.(steps[at]);
    });
    plot.addEventListener("pointercancel", () => { from = null; });
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) {
        event.preventDefault();
        point(Math.max(0, Math.min(steps.length - 1, (pointed ?? (by > 0 ? -1 : steps.length)) + by)));
      } else if (event.key === "Enter" && pointed !== null) {
        event.stopPropagation();
        onStep?.(steps[pointed]);
      }
    });
    const title = h("button", {
      type: "button", class: "sort", title: "Larger or smaller", "aria-expanded": isLarge, onclick: () => {
        isLarge = !isLarge;
        [width, height] = isLarge ? LARGE : SMALL;
        title.setAttribute("aria-expanded", isLarge);
        element.classList.toggle("large", isLarge);
        draw();
      },
    }, panel.title);
    const element = h("figure", { class: `chart${isLarge ? " large" : ""}` },
      h("figcaption", null, title, panel.unit && muted(` ${panel.unit}`)), legend, plot);
    draw();
    say(null);
    return {
      element,
      draw,
      update: (longer) => {
        panel = longer;
        draw();
        say(pointed);
      },
      point: (at) => {
        pointed = at;
        drawMarks(at, plot.toY);
        say(at);
      },
    };
  }

  const element = h("div", null, sections(panels).map(({ group, places }) => h("section", null,
    group && h("h3", null, group), h("div", { class: "board" }, places.map((at) => charts[at].element)))));
  return { element, reset, logs, update, zoom, range: () => range === all ? null : range };
}

/** Sections of consecutive panels of the same group. */
function sections(panels) {
  const found = [];
  panels.forEach(({ group }, at) => {
    if (found.at(-1)?.group === group) found.at(-1).places.push(at);
    else found.push({ group, places: [at] });
  });
  return found;
}

const last = (values) => values.findLast((value) => !isNone(value));

/** The labels of an axis' marks, which are round values. */
function axis(values) {
  const most = Math.max(...values.map(Math.abs));
  const [scale, letter] = most >= 1e9 ? [1e9, "G"] : most >= 1e6 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
  const round = (value) => Number((value / scale).toPrecision(6));
  const isSmall = most < 0.001;
  return values.map((value) => {
    const name = isSmall && value ? round(value).toExponential() : `${round(value)}${value ? letter : ""}`;
    return name.replaceAll("-", "−");
  });
}

/** A value with its interval on a line from `low` to `high`; `zero` marks the place of no change. */
export function interval(mean, bounds, [low, high], { zero = null, label = "" } = {}) {
  const x = (value) => 2 + 96 * ((value - low) / (high - low || 1));
  const [from, to] = bounds ?? [mean, mean];
  const view = { viewBox: "0 0 100 14", preserveAspectRatio: "none" };
  return s("svg", { ...view, class: "interval", role: "img", "aria-label": label },
    zero !== null && s("line", { class: "grid", x1: x(zero), x2: x(zero), y1: 0, y2: 14 }),
    from !== null && to !== null && s("line", { class: "whisker", x1: x(from), x2: x(to), y1: 7, y2: 7 }),
    s("rect", { class: "mean", x: x(mean) - 1.2, y: 2, width: 2.4, height: 10 }));
}

/** A curve without axes, as wide as a word. */
export function sparkline(values, [low, high], label) {
  const y = (value) => 15 - 14 * ((value - low) / (high - low || 1));
  const points = values.map((value, at) => isNone(value) ? null : [100 * at / (values.length - 1), y(value)]);
  const view = { viewBox: "0 0 100 16", preserveAspectRatio: "none" };
  return s("svg", { ...view, class: "spark", role: "img", "aria-label": label },
    s("path", { class: "line c0", d: path(points) }));
}
