// The list that the reader came from: `[` and `]` step through it, and `u` returns to it with its filter.

import { href } from "./dom.js";

let list = null; // the run, the query, and the indices of the rollouts that were opened from it

const nameOf = (row) => `${row.request_id} ${row.trajectory_index}`;

/** Remember that a row was opened, and its index `at` in the list. */
export function opened(run, query, row, at) {
  if (list?.run !== run || JSON.stringify(list.query) !== JSON.stringify(query)) {
    list = { run, query, places: new Map() };
  }
  list.places.set(nameOf(row), at);
}

/** The address of the last list. */
export const listOf = (run) => href(["run", run, "rollouts"], list?.run === run ? list.query : {});

/** The rows before and after a rollout in its list (or null), and its index there. */
export async function neighbours(api, run, row) {
  const at = list?.run === run ? list.places.get(nameOf(row)) : undefined;
  if (at === undefined) return null;
  const query = list.query;
  const phase = query.phase === "*" ? null : query.phase;
  const first = Math.max(0, at - 1);
  const { rows, total } = await api.rollouts(run, { ...query, phase, offset: first, limit: 3 });
  const place = rows.findIndex((each) => nameOf(each) === nameOf(row));
  if (place < 0) return null;
  const near = (by) => {
    const found = rows[place + by];
    if (found) opened(run, query, found, first + place + by);
    return found ?? null;
  };
  return { before: near(-1), after: near(1), at: first + place, total };
}
