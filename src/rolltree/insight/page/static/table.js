// A table of any length: only the visible rows exist, and their data is loaded page by page.

import { h } from "./dom.js";

const ROW_PX = 32;
export const PAGE = 200;
const SPARE = 16; // rows that are drawn above and below the visible ones
const LEAST = 8; // rows that may be left there before more are drawn
const REST_MS = 120; // after so long without a scroll, slow values are requested

/**
 * A virtual table. `columns` are {name, label, width, cell(row), numeric, minor, sort};
 * `fetchRows(offset, limit)` returns {total, rows}, and `begun` is its first result; `link(row)` returns the address
 * that a row opens, and `onOpen(row, at)` is called then; `complete(rows)` returns further values by address.
 */
export async function virtualTable({ columns, fetchRows, begun, link, sort, onSort, onOpen, complete, empty }) {
  const pages = new Map();
  const drawn = new Map();
  const extras = new Map();
  const addresses = new WeakMap(); // cached, since every frame of a scroll needs those of the visible rows
  const addressOf = (row) => {
    if (!addresses.has(row)) addresses.set(row, link(row));
    return addresses.get(row);
  };
  let asked = new Set();
  let rest = 0;
  let held = null; // settles when the pointer is released
  const first = begun ?? await fetchRows(0, PAGE);
  pages.set(0, first.rows);
  let total = first.total;
  const widths = columns.map((column) => column.width).join(" ");
  const kept = columns.filter((column) => !column.minor).map((column) => column.narrow ?? column.width);
  let marked = -1;
  let isBusy = false;
  let isDue = false;
  let sight = [0, 0]; // the range of rows that are drawn

  const head = h("div", { class: "vrow vhead", role: "row" }, columns.map((column) => {
    const isSorted = column.sort && sort?.replace("-", "") === column.sort;
    const arrow = isSorted ? (sort.startsWith("-") ? " ↓" : " ↑") : "";
    const turn = () => onSort(isSorted && sort.startsWith("-") ? column.sort : `-${column.sort}`);
    return h("div", {
      class: cellClass(column), role: "columnheader",
      "aria-sort": isSorted ? (sort.startsWith("-") ? "descending" : "ascending") : null,
    }, column.sort && onSort
      ? h("button", { type: "button", class: "sort", title: "Sort", onclick: turn }, `${column.label}${arrow}`)
      : column.label);
  }));
  const body = h("div", { class: "vbody", role: "rowgroup" });
  const box = h("div", {
    class: "vtable", role: "table", tabindex: "0", "aria-rowcount": total, "data-virtual": true,
    vars: { "--columns": widths, "--columns-narrow": kept.join(" "), "--row": `${ROW_PX}px` },
  }, head, body);
  body.style.height = `${total * ROW_PX}px`;
  if (!total) return h("p", { class: "muted empty" }, empty ?? "Nothing here.");

  const rowAt = (at) => pages.get(Math.floor(at / PAGE))?.[at % PAGE];

  /** Load missing pages one at a time at the table's present place, so that pages scrolled past are not loaded. */
  async function load() {
    if (isBusy) return;
    isBusy = true;
    for (let page = missing(); page !== undefined; page = missing()) {
      try {
        pages.set(page, (await fetchRows(page * PAGE, PAGE)).rows);
      } catch {
        break;
      }
      draw();
    }
    isBusy = false;
  }

  /** The next page to load: a visible one, else one nearby. */
  function missing() {
    const [top, end] = sight;
    const wanted = [top, end - 1, end - 1 + PAGE / 2, top - PAGE / 2].filter((at) => at >= 0 && at < total);
    return wanted.map((at) => Math.floor(at / PAGE)).find((page) => !pages.has(page));
  }

  /** Draw the rows that come into sight, and remove those that left it; the others stay. */
  function draw() {
    const first = Math.floor(box.scrollTop / ROW_PX);
    const last = first + Math.ceil((box.clientHeight || 600) / ROW_PX);
    const [above, below] = [Math.max(0, first - LEAST), Math.min(total, last + LEAST)];
    if (above < sight[0] || below > sight[1]) sight = [Math.max(0, first - SPARE), Math.min(total, last + SPARE)];
    const [top, end] = sight;
    for (const [at, { element, row, more }] of drawn) {
      if (at >= top && at < end && row === rowAt(at) && more === (row && extras.get(addressOf(row)))) continue;
      element.remove();
      drawn.delete(at);
    }
    let next = null;
    for (let at = end - 1; at >= top; at -= 1) {
      if (!drawn.has(at)) {
        const row = rowAt(at);
        const more = row && extras.get(addressOf(row));
        drawn.set(at, { element: drawRow(at, more ? { ...row, ...more } : row), row, more });
        body.insertBefore(drawn.get(at).element, next);
      }
      next = drawn.get(at).element;
    }
    load();
    clearTimeout(rest);
    if (complete) rest = setTimeout(fillIn, REST_MS);
  }

  /** Load the further values of the rows in sight. */
  async function fillIn() {
    const rows = [...drawn.values()].map(({ row }) => row).filter((row) => row && !asked.has(addressOf(row)));
    if (!rows.length || !box.isConnected) return;
    rows.forEach((row) => asked.add(addressOf(row)));
    const found = await complete(rows).catch(() => new Map());
    await held; // a row that is drawn anew while it is pressed gets no click
    for (const [address, more] of found) {
      if (JSON.stringify(extras.get(address)) !== JSON.stringify(more)) extras.set(address, more);
    }
    draw();
  }

  function drawRow(at, row) {
    const name = `vrow${at === marked ? " marked" : ""}${row?.error_type ? " failed" : ""}`;
    const attributes = { class: name, role: "row", "aria-rowindex": at + 2, vars: { top: `${at * ROW_PX}px` } };
    if (!row) return h("div", attributes, h("div", { class: "cell muted", role: "cell" }, "…"));
    const address = link(row);
    return h("div", {
      ...attributes, "data-row": true,
      onclick: (event) => {
        onOpen?.(row, at);
        if (!event.target.closest("a, button, input") && !String(getSelection())) location.hash = address;
      },
    }, columns.map((column, index) => h("div", { class: cellClass(column), role: "cell" },
      index === 0 ? h("a", { href: address }, column.cell(row)) : column.cell(row))));
  }

  function cellClass(column) {
    return ["cell", column.numeric && "number", column.minor && "minor"].filter(Boolean).join(" ");
  }

  /** Load the visible rows again. They stay in place, and the marked one marked, if rows were added before them. */
  async function refresh() {
    const top = Math.floor(box.scrollTop / ROW_PX);
    const [seen, chosen] = [top, marked].map((at) => rowAt(at) && link(rowAt(at)));
    const page = Math.floor(top / PAGE);
    const now = await fetchRows(page * PAGE, PAGE);
    const fresh = new Map([[page, now.rows]]);
    const last = Math.floor((top + box.clientHeight / ROW_PX + Math.max(0, now.total - total)) / PAGE);
    for (let next = page + 1; next <= last && next * PAGE < now.total; next += 1) {
      fresh.set(next, (await fetchRows(next * PAGE, PAGE)).rows);
    }
    const placeOf = (address, otherwise) => {
      for (const [number, rows] of fresh) {
        const at = rows.findIndex((row) => link(row) === address);
        if (at >= 0) return number * PAGE + at;
      }
      return otherwise;
    };
    for (const [number, rows] of fresh) {
      const known = pages.get(number) ?? [];
      const isSame = (row, at) => known[at] && JSON.stringify(known[at]) === JSON.stringify(row);
      fresh.set(number, rows.map((row, at) => isSame(row, at) ? known[at] : row)); // its element keeps the focus
    }
    await held;
    pages.clear();
    for (const [number, rows] of fresh) pages.set(number, rows);
    total = now.total;
    body.style.height = `${total * ROW_PX}px`;
    box.setAttribute("aria-rowcount", total);
    asked = new Set();
    mark(chosen ? placeOf(chosen, marked) : marked);
    if (seen && box.scrollTop > 0) box.scrollTop += (placeOf(seen, top) - top) * ROW_PX;
    draw();
  }

  function mark(at) {
    drawn.get(marked)?.element.classList.remove("marked");
    marked = at;
    drawn.get(marked)?.element.classList.add("marked");
  }

  body.addEventListener("pointerdown", () => {
    held = new Promise((done) => {
      for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(done), { once: true });
    });
  });
  box.addEventListener("refresh", (event) => { event.detail.done = refresh(); });
  box.addEventListener("scroll", () => {
    if (!isDue) requestAnimationFrame(() => { isDue = false; draw(); });
    isDue = true;
  }, { passive: true });
  box.addEventListener("move", (event) => {
    const seen = [Math.ceil(box.scrollTop / ROW_PX), Math.floor((box.scrollTop + box.clientHeight) / ROW_PX) - 2];
    const isAway = marked < seen[0] - 1 || marked > seen[1] + 1; // then the first key marks a visible row
    const next = isAway ? seen[event.detail > 0 ? 0 : 1] : marked + event.detail;
    mark(Math.max(0, Math.min(total - 1, next)));
    const above = marked * ROW_PX;
    const height = box.clientHeight - ROW_PX;
    if (above < box.scrollTop) box.scrollTop = above;
    else if (above + ROW_PX > box.scrollTop + height) box.scrollTop = above + ROW_PX - height;
    draw();
  });
  new ResizeObserver(draw).observe(box);
  draw();
  return box;
}
