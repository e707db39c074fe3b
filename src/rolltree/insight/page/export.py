"""Exports a run as one HTML file that opens from disk and can be mailed.

The file is the viewer's page with the responses of its endpoints embedded. Numbers and curves cover
the whole run, but only the chosen rollouts are in the file.
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

from rolltree._helpers.files import check_replaced, write_whole
from rolltree._helpers.redact import redact
from rolltree.insight.comparison import held_out_gain
from rolltree.insight.page.bundle import PAGE_DATA, page_with
from rolltree.insight.page.curves import run_curves
from rolltree.insight.page.evaluation_view import evaluation_view
from rolltree.insight.page.glance import run_glance
from rolltree.insight.page.group_tree import group_tree, tree_picture
from rolltree.insight.page.pages import (
    group_counts,
    group_rows,
    rollout_counts,
    rollout_rows,
    row_previews,
)
from rolltree.insight.page.rollout_view import rollout_view
from rolltree.insight.page.token_lens import COLUMNS, token_lens
from rolltree.records.chosen import shown_requests, telling_requests
from rolltree.records.overview import run_overview, run_summary
from rolltree.records.story import run_story
from rolltree.records.values import clean_text, json_bytes
from rolltree.store import Run, to_plain
from rolltree.values.errors import ConfigError, StoreError, UnknownName

MAX_BYTES = 12_000_000
"""Size limit of the embedded data unless rollouts are chosen: mail takes 20 MB after encoding."""
_DEFAULT_LIMIT = 24
_MIN_SAME = 8


@dataclass(frozen=True, slots=True)
class ExportedPage:
    """The contents of a file: `num_...` are in the file, out of `of_...` in the run."""

    num_bytes: int
    num_rollouts: int
    of_rollouts: int
    num_groups: int
    of_groups: int
    # Rollouts whose tokens were left out for lack of room.
    num_without_tokens: int
    # Number of rollouts by the reason for their choice; empty if the caller chose, or all are in.
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
        target: the file to write, which ends with `.html`. An earlier page is replaced when the
            new one is complete.
        where: conditions that rollouts must meet, as in `Run.rollouts`.
        sort: the order in which rollouts are taken.
        limit: how many requests to take; 24 if there are conditions or an order. Without any of the
            three, the most informative requests are taken (`telling_requests`), up to `MAX_BYTES`.

    Raises:
        ConfigError: the file has a different suffix, or is there and is no such page; a filter is
            invalid, or no rollout passes it.
        StoreError: the run is missing or damaged, or the file cannot be written.
    """
    target = Path(target)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"{target} does not end with .html, so browsers would not open it as a page. Name it, "
            f"for instance, {target.with_suffix('.html').name}."
        )
    check_replaced(target, lambda file: PAGE_DATA in file.read_bytes())
    with Run.open(path, mode="r") as run:
        story = run_story(run)
        if where or sort is not None or limit:
            num = limit or _DEFAULT_LIMIT
            chosen = shown_requests(run, num=num, where=where, sort=sort)
            if not chosen.request_ids:
                raise ConfigError(
                    f"no rollout of {run.path} passes {' and '.join(where) or 'this choice'}, so "
                    "the file would be empty. `rolltree show` lists the run's rollouts."
                )
            file = _File(run, None, dict.fromkeys(chosen.request_ids, ""))
        else:
            file = _File(run, MAX_BYTES, telling_requests(run, story["sentences"]))
        data = file.data(story)
    page = page_with(json_bytes(data)).encode()
    _write(target, page)
    return file.exported(len(page))


class _File:
    """Collects the responses for a file, in at most `room` bytes (None: no limit)."""

    def __init__(self, run: Run, room: int | None, reasons: Mapping[str, str]) -> None:
        self._run = run
        self._room = room
        self._reasons = reasons
        self._of_rollouts = run.num_rollouts()
        self._of_groups = group_counts(run)
        self._rollouts: dict[tuple[str, int], list[int]] = {}  # to the numbers of their calls
        self._groups: list[str] = []
        self._num_without_tokens = 0

    def data(self, story: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data that `static/stored.js` reads."""
        run, name = self._run, _name(self._run.path.resolve().name)
        glance = {**run_glance(run), "health": next(iter(story["sentences"]), None)}
        overview = {"id": name, **run_overview(run), "path": name}
        answers = {
            "summary": _answer({**run_summary(run), "path": name}),
            "curves": _answer(run_curves(run)),
            "gain": _answer(held_out_gain(run)),
            "story": _answer(story),
            "evaluation": {
                _name(phase): _answer(evaluation_view(run, phase))
                for phase in run.phases()
                if phase != "train"
            },
            **self._views(),
            "rollouts": self._rollout_table(story),
            "groups": self._group_table(),
        }
        return {
            "run": name,
            "created_at": time.time(),
            "num_rollouts": len(self._rollouts),
            "of": self._of_rollouts,
            "answers": {
                "runs": [_answer(overview)],
                "health": {name: _answer(glance)},
                "run": {name: answers},
            },
        }

    def exported(self, num_bytes: int) -> ExportedPage:
        """Return a summary of the file's contents."""
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
        """Reserve room for a response; return whether there was enough."""
        size = len(answer if isinstance(answer, msgspec.Raw) else json_bytes(answer))
        if self._room is not None:
            if size > self._room:
                return False
            self._room -= size
        return True

    def _views(self) -> dict[str, Any]:
        """Return the views of rollouts and groups, and as many tokens as there is room for."""
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
        # In the order in which people read: text before trees, and tokens last, which are largest.
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
                _at(trees, group_id)["group"] = _answer(tree_picture(run, group=group_id))
        for (request_id, index), numbers in self._rollouts.items():
            calls = _packed_calls(run, request_id, index, numbers)
            if self._take(calls):
                _at(tokens, request_id)[str(index)] = calls
            else:
                self._num_without_tokens += 1
        return {"rollout": rollouts, "tree": trees, "group": groups, "tokens": tokens}

    def _rollout_table(self, story: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of the file's rollouts, and which of them pass each linked filter."""
        run, ids = self._run, list({request_id: None for request_id, _ in self._rollouts})
        rows = [row for row in rollout_rows(run, request_id=ids) if _key(row) in self._rollouts]
        shown = row_previews(run, [_key(row) for row in rows])
        rows = [{**row, **preview} for row, preview in zip(rows, shown, strict=True)]
        places = {_key(row): at for at, row in enumerate(rows)}
        linked = [each["evidence"].get("where") for each in story["sentences"]]
        filters: list[dict[str, Any]] = []
        for where in dict.fromkeys([None, "status = error", *filter(None, linked)]):
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
    """Encode a response for the file: JSON without secrets."""
    # Files are passed on, so secrets that were stored before they were known are redacted here.
    return msgspec.Raw(json_bytes(redact(to_plain(value))))


def _name(text: str) -> str:
    """Return a name in the form that `_answer` would give it."""
    return str(redact(clean_text(text)))


def _at(answers: dict[str, Any], request_id: str) -> dict[str, Any]:
    place: dict[str, Any] = answers.setdefault(_name(request_id), {})
    return place


# -- tokens ----------------------------------------------------------------------------------------


def _packed_calls(run: Run, request_id: str, index: int, calls: Sequence[int]) -> dict[str, Any]:
    """Return the token lens of every call that has tokens; common prefixes are stored once.

    Each has `lens` (all except the columns), `columns`, and `after`: the earlier call with the
    longest common prefix.
    """
    packed_calls: dict[str, Any] = {}
    known: dict[int, dict[str, Any]] = {}
    for call in calls:
        try:
            lens = token_lens(run, request_id, index, call)
        except UnknownName:
            continue
        columns: dict[str, Any] = {name: _short(lens.pop(name)) for name in COLUMNS}
        ids = columns["ids"]
        # A later turn repeats earlier ones. With these stored once, T turns take O(T) bytes, not
        # O(T^2).
        after = max(
            list(known)[-_MIN_SAME:],
            key=lambda each: common_prefix_len(known[each]["ids"], ids),
            default=None,
        )
        before: Mapping[str, Any] = {} if after is None else known[after]
        packed_calls[str(call)] = {
            "lens": _answer(lens),
            "after": after,
            "columns": {name: packed(columns[name], before.get(name)) for name in COLUMNS},
        }
        known[call] = columns
    return packed_calls


def _short(column: list[Any] | None) -> list[Any] | None:
    """Round floats to nine significant digits, which identify every float32."""
    if column is None:
        return None
    return [float(f"{each:.9g}") if isinstance(each, float) else each for each in column]


def common_prefix_len(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two columns."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def packed(column: Sequence[Any] | None, before: Sequence[Any] | None = None) -> list[Any] | None:
    """Compress a column: `{"same": n}` stands for the first n values of `before`, and
    `{"value": v, "times": n}` for a repeated value.

    >>> packed([1, 2, None, None, None, None], [1, 2, 3])
    [1, 2, {'value': None, 'times': 4}]
    """
    if column is None:
        return None
    same = common_prefix_len(column, before or ())
    if same < _MIN_SAME:
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
            f"{target} cannot be written ({error.strerror or error}), so the run was not "
            "exported. Check the folder and the free space, or choose another file."
        ) from error
