// A file that `rolltree view --export` wrote contains the answers, which the same views show without a server.

const element = document.getElementById("data");

/** The data of the file, with its `answers` by the parts of their addresses; null on a served page. */
export const file = element ? JSON.parse(element.textContent) : null;

/** The parts of an address after its `#/`, without its query. */
export function partsOf(address) {
  const path = address.replace(/^#\/?/, "").split("?")[0];
  return path ? path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  }) : [];
}

function look(names) {
  let found = file.answers;
  for (const name of names) {
    if (found === null || typeof found !== "object" || !Object.hasOwn(found, name)) return undefined;
    found = found[name];
  }
  return found;
}

async function need(...names) {
  const found = look(names);
  if (found === undefined) throw new Error("That is not in this file. The whole run opens with `rolltree view`.");
  return found;
}

/** Whether an address can be opened. A file has only some rollouts, and links to others are drawn as text. */
export function isInside(address) {
  if (!file || !address.startsWith("#/")) return true;
  const parts = partsOf(address);
  if (parts[2] === "tree" && parts.length === 4) parts.push("group");
  return look(parts) !== undefined;
}

/** A page of the file's rows, and `of`: the number of rows in the run that pass the same filter. */
async function page(table, { phase, step, trained, where, sort, offset, limit }) {
  const filter = table.filters.find((each) => each.where === (where || null));
  if (!filter) throw new Error("This file has only the filters of its links; `rolltree view` has all.");
  const isWanted = (of, at) => (!phase || of === phase) && (!step || at === Number(step));
  const rows = filter.rows.map((at) => table.rows[at])
    .filter((row) => isWanted(row.phase, row.train_step) && (!trained || row.trained_step === Number(trained)));
  const counted = filter.counts.reduce((sum, [its, at, number]) => sum + (isWanted(its, at) ? number : 0), 0);
  const of = trained ? undefined : counted; // the file does not say how many others a step trained
  if (sort) {
    const name = sort.replace("-", "");
    const sign = sort.startsWith("-") ? -1 : 1;
    const isMissing = (row) => (row[name] ?? null) === null;
    const compared = (a, b) => (isMissing(a) ? 0 : sign * ((a[name] > b[name]) - (a[name] < b[name])));
    rows.sort((a, b) => isMissing(a) - isMissing(b) || compared(a, b));
  }
  return { total: rows.length, of, rows: rows.slice(offset, offset + limit) };
}

const unpacked = new Map();

const mapped = (columns, change) =>
  Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column && change(column, name)]));

/** The unpacked column: it may begin like that of an earlier call, and repeated values are stored once. */
function unpack(column, before) {
  const found = column[0]?.same ? before.slice(0, column[0].same) : [];
  for (const each of column) {
    if (each === null || typeof each !== "object") found.push(each);
    else for (let left = each.times ?? 0; left > 0; left -= 1) found.push(each.value);
  }
  return found;
}

function columnsOf(calls, call) {
  const stored = calls[call];
  if (!unpacked.has(stored)) {
    const before = stored.after === null ? {} : columnsOf(calls, stored.after);
    unpacked.set(stored, mapped(stored.columns, (column, name) => unpack(column, before[name])));
  }
  return unpacked.get(stored);
}

async function tokens(run, { id, index, call, offset, limit }) {
  const calls = await need("run", run, "tokens", id, index);
  const { lens } = await need("run", run, "tokens", id, index, call);
  return { ...lens, offset, ...mapped(columnsOf(calls, call), (column) => column.slice(offset, offset + limit)) };
}

const aged = (run) => ({ ...run, age_s: Math.max(0, Date.now() / 1000 - run.last_written) });

/** The endpoints of `api.js`, answered from the file. */
export const storedApi = {
  runs: async () => ({ runs: (await need("runs")).map(aged) }),
  health: async () => ({ runs: await need("health"), left: 0 }),
  run: async (run) => aged(await need("run", run, "summary")),
  curves: (run) => need("run", run, "curves"),
  story: (run) => need("run", run, "story"),
  evaluation: (run, { phase }) => need("run", run, "evaluation", phase),
  gain: (run) => need("run", run, "gain"),
  rollouts: async (run, query) => page((await need("run", run, "rollouts")), query),
  groups: async (run, query) => page((await need("run", run, "groups")), query),
  group: (run, { id, agent }) => need("run", run, "group", id, agent ?? "*"),
  rollout: (run, { id, index }) => need("run", run, "rollout", id, index),
  tokens,
  tree: (run, { id, index, group }) => need("run", run, "tree", group ?? id, group === undefined ? index : "group"),
  compare: () => need("compare"),
};
