"""A run as one HTML file that opens from disk and can be mailed: summary and chosen rollouts.

The file is the page itself with the answers of its endpoints inside. What a person is shown of the
rest of the run is its numbers; the other rollouts are not in the file.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rolltree.errors import ConfigError, StoreError, UnknownName
from rolltree.files import write_whole
from rolltree.records.chosen import shown_requests, telling_requests
from rolltree.records.curves import run_curves
from rolltree.records.group_tree import group_tree, tree_picture
from rolltree.records.overview import run_overview, run_summary
from rolltree.records.pages import group_counts, group_rows, rollout_counts, rollout_page
from rolltree.records.rollout_view import rollout_view
from rolltree.records.story import run_story
from rolltree.records.token_lens import COLUMNS, token_lens
from rolltree.records.values import clean_text, json_bytes
from rolltree.redact import redact
from rolltree.store import Run, to_plain
from rolltree.viewer.bundle import page_with

MAX_BYTES = 12_000_000
"""About what is put into a file unless somebody says what: mail takes 20 MB as it encodes them."""
_DEFAULT_LIMIT = 24
_LEAST_SAME = 8


@dataclass(frozen=True, slots=True)
class ExportedPage:
    """What is in a file: `num_...` of the run's `of_...`."""

    num_bytes: int
    num_rollouts: int
    of_rollouts: int
    num_groups: int
    of_groups: int
    # Rollouts without a token lens, for which there was no room.
    num_without_tokens: int
    # How many rollouts for which reason; none if they were asked for, or are all.
    reasons: Mapping[str, int]


def export_page(
    path: str | Path,
    target: str | Path,
    *,
    where: Sequence[str] = (),
    sort: str | None = None,
    limit: int | None = None,
) -> ExportedPage:
    """Write a run's summary and chosen rollouts as one HTML file, and return what is in it.

    Args:
        path: the run.
        target: the file, which is replaced when it is whole; it ends with `.html`.
        where: conditions that the rollouts pass, as `Run.rollouts` has them.
        sort: the order of which the first are taken.
        limit: how many requests are taken, 24 if there are conditions or an order. With none of the
            three, those that tell most are taken (`telling_requests`), up to `MAX_BYTES`.

    Raises:
        ConfigError: the file has another suffix, a filter cannot be read, or no rollout passes it.
        StoreError: there is no run, it is damaged, or the file cannot be written.
    """
    target = Path(target)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"{target} has no suffix by which a browser knows a page. Name it, for instance, "
            f"{target.with_suffix('.html').name}."
        )
    with Run.open(path, mode="r") as run:
        story = run_story(run)
        if where or sort or limit:
            num = limit or _DEFAULT_LIMIT
            chosen = shown_requests(run, num=num, where=where, sort=sort)
            if not chosen.request_ids:
                raise ConfigError(
                    f"no rollout of {run.path} passes {' and '.join(where) or 'this choice'}, so "
                    "the file would have none. Look with `rolltree show` what there is."
                )
            file = _File(run, None, dict.fromkeys(chosen.request_ids, ""))
        else:
            file = _File(run, MAX_BYTES, telling_requests(run, story["sentences"]))
        data = file.data(story)
    page = page_with(json_bytes(data)).encode()
    _write(target, page)
    return file.exported(len(page))


class _File:
    """The answers that go into a file, and how many bytes there is still room for (None: any)."""

    def __init__(self, run: Run, room: int | None, reasons: Mapping[str, str]) -> None:
        self._run = run
        self._room = room
        self._reasons = reasons
        self._of_rollouts = run.num_rollouts()
        self._of_groups = group_counts(run)
        self._rollouts: dict[tuple[str, int], list[int]] = {}  # with the numbers of their calls
        self._groups: list[str] = []
        self._num_without_tokens = 0

    def data(self, story: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `static/stored.js` reads."""
        run, name = self._run, _name(self._run.path.resolve().name)
        overview = {"id": name, **run_overview(run), "path": name}
        answers = {
            "summary": _answer({**run_summary(run), "path": name}),
            "curves": _answer(run_curves(run)),
            "story": _answer(story),
            **self._views(),
            "rollouts": self._rollout_table(story),
            "groups": self._group_table(),
        }
        return {
            "run": name,
            "created_at": time.time(),
            "num_rollouts": len(self._rollouts),
            "of": self._of_rollouts,
            "answers": {"runs": [_answer(overview)], "run": {name: answers}},
        }

    def exported(self, num_bytes: int) -> ExportedPage:
        """Return what is in the file."""
        reasons = Counter(self._reasons[request_id] for request_id, _ in self._rollouts)
        del reasons[""]
        return ExportedPage(
            num_bytes=num_bytes,
            num_rollouts=len(self._rollouts),
            of_rollouts=self._of_rollouts,
            num_groups=len(self._groups),
            of_groups=sum(num for *_, num in self._of_groups),
            num_without_tokens=self._num_without_tokens,
            reasons=dict(reasons),
        )

    def _take(self, answer: msgspec.Raw | dict[str, Any]) -> bool:
        """Whether there is room for an answer, which is taken then."""
        size = len(answer if isinstance(answer, msgspec.Raw) else json_bytes(answer))
        if self._room is not None:
            if size > self._room:
                return False
            self._room -= size
        return True

    def _views(self) -> dict[str, Any]:
        """Return the views of rollouts and groups; then, as long as there is room, the tokens."""
        run = self._run
        rollouts: dict[str, Any] = {}
        trees: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        tokens: dict[str, Any] = {}
        columns = ("request_id", "trajectory_index", "group_id")
        rows = list(run.columns(columns, request_id=list(self._reasons)))
        order = {request_id: at for at, request_id in enumerate(self._reasons)}
        rows.sort(key=lambda row: (order[row[0]], row[1]))
        wanted: dict[str, None] = {}
        # What is read first is taken first: words before trees, tokens last, since they are most of
        # a file.
        for request_id, index, group_id in rows:
            view = rollout_view(run, request_id, index)
            answer = _answer(view)
            if not self._take(answer):
                continue
            self._rollouts[request_id, index] = [call["call"] for call in view["calls"]]
            _at(rollouts, request_id)[str(index)] = answer
            tree = _answer(tree_picture(run, request_id, index))
            if self._take(tree):
                _at(trees, request_id)[str(index)] = tree
            if group_id:
                wanted[group_id] = None
        for group_id in wanted:
            whole = group_tree(run, group_id)
            lenses = {"*": _answer(whole)}
            for agent in whole["agents"] if len(whole["agents"]) > 1 else ():
                lenses[_name(agent)] = _answer(group_tree(run, group_id, agent=agent))
            if self._take(lenses):
                self._groups.append(group_id)
                groups[_name(group_id)] = lenses
                _at(trees, group_id)["group"] = _answer(tree_picture(run, group_id=group_id))
        for (request_id, index), numbers in self._rollouts.items():
            calls = _packed_calls(run, request_id, index, numbers)
            if self._take(calls):
                _at(tokens, request_id)[str(index)] = calls
            else:
                self._num_without_tokens += 1
        return {"rollout": rollouts, "tree": trees, "group": groups, "tokens": tokens}

    def _rollout_table(self, story: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows that are inside, and which of them pass the filters that links have."""
        run, ids = self._run, list({request_id: None for request_id, _ in self._rollouts})
        rows: list[dict[str, Any]] = []
        while ids and (page := rollout_page(run, request_id=ids, offset=len(rows), limit=1000)):
            rows += page["rows"]
            if len(page["rows"]) < 1000:
                break
        rows = [row for row in rows if _key(row) in self._rollouts]
        places = {_key(row): at for at, row in enumerate(rows)}
        told = [each["evidence"].get("where") for each in story["sentences"]]
        filters: list[dict[str, Any]] = []
        for where in dict.fromkeys([None, "status = error", *filter(None, told)]):
            passing = run.columns(("request_id", "trajectory_index"), request_id=ids, where=where)
            filters.append(
                {
                    "where": where,
                    "counts": rollout_counts(run, where),
                    "rows": [places[name] for name in passing if name in places],
                }
            )
        return {"rows": [_answer(row) for row in rows], "filters": filters}

    def _group_table(self) -> dict[str, Any]:
        began = self._run.query(
            "SELECT group_id FROM rollouts WHERE group_id IN (SELECT value FROM json_each(?))"
            " GROUP BY group_id ORDER BY min(id)",
            json.dumps(self._groups),
        )
        rows = group_rows(self._run, [row["group_id"] for row in began])
        every = {"where": None, "counts": self._of_groups, "rows": list(range(len(rows)))}
        return {"rows": [_answer(row) for row in rows], "filters": [every]}


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["request_id"], row["trajectory_index"]


def _answer(value: Any) -> msgspec.Raw:
    """Return an answer as it stands in the file: JSON without secrets."""
    # A file is sent to others: secrets that came in before they were known are cut out here.
    return msgspec.Raw(json_bytes(redact(to_plain(value))))


def _name(text: str) -> str:
    """Return a name as `_answer` has it."""
    return str(redact(clean_text(text)))


def _at(found: dict[str, Any], request_id: str) -> dict[str, Any]:
    place: dict[str, Any] = found.setdefault(_name(request_id), {})
    return place


# -- tokens ----------------------------------------------------------------------------------------


def _packed_calls(run: Run, request_id: str, index: int, calls: Sequence[int]) -> dict[str, Any]:
    """Return the token lens of every call that has tokens, what calls have in common once.

    Each has `lens` (all but the columns), `columns`, and `after`: the call before it that begins
    with most of the same tokens.
    """
    found: dict[str, Any] = {}
    known: dict[int, dict[str, Any]] = {}
    for call in calls:
        try:
            lens = token_lens(run, request_id, index, call)
        except UnknownName:
            continue
        columns: dict[str, Any] = {name: _short(lens.pop(name)) for name in COLUMNS}
        ids = columns["ids"]
        # A later turn repeats the turns before it: stored once, a file of T turns grows with T.
        after = max(
            list(known)[-_LEAST_SAME:],
            key=lambda each: num_same(known[each]["ids"], ids),
            default=None,
        )
        before: Mapping[str, Any] = {} if after is None else known[after]
        found[str(call)] = {
            "lens": _answer(lens),
            "after": after,
            "columns": {name: packed(columns[name], before.get(name)) for name in COLUMNS},
        }
        known[call] = columns
    return found


def _short(column: list[Any] | None) -> list[Any] | None:
    """Return a column whose numbers have nine digits, which tell every float32 from the others."""
    if column is None:
        return None
    return [float(f"{each:.9g}") if isinstance(each, float) else each for each in column]


def num_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many values two columns begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def packed(column: Sequence[Any] | None, before: Sequence[Any] | None = None) -> list[Any] | None:
    """Return a column in less room: `{"same": n}` stands for the first n values of `before`, and
    `{"value": v, "times": n}` for a value that is repeated.

    >>> packed([1, 2, None, None, None, None], [1, 2, 3])
    [1, 2, {'value': None, 'times': 4}]
    """
    if column is None:
        return None
    same = num_same(column, before or ())
    if same < _LEAST_SAME:
        same = 0
    found: list[Any] = [{"same": same}] if same else []
    for value, run in groupby(column[same:]):
        times = sum(1 for _ in run)
        found += [{"value": value, "times": times}] if times > 3 else [value] * times
    return found


# -- the file --------------------------------------------------------------------------------------


def _write(target: Path, content: bytes) -> None:
    try:
        write_whole(target, content)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written ({error.strerror or error}), so there is no page. Check "
            "the folder and the free space, or choose another file."
        ) from error
