"""`Trajectory` against a plain list: slices, copies, joins and every way to change it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokens_trajectory import make_response, plain_step
from tokens_kit import examples

from rolltree.tokens import PlacedStream, StepTokens, TokenStream, Trajectory
from rolltree.values.errors import TokenError


def steps_of(count: int) -> list[Any]:
    """Return steps that extend each other, so that they share a path."""
    return [plain_step(list(range(n + 1)), [n + 1], turn=n) for n in range(count)]


def handles(trajectory: Trajectory) -> list[int | None]:
    return [trajectory.call_of(index) for index in range(len(trajectory))]


class TestSlices:
    @examples(80)
    @given(st.integers(0, 6), st.slices(7))
    def test_a_slice_is_the_slice_of_the_list(self, count: int, part: slice) -> None:
        plain = steps_of(count)
        trajectory = Trajectory(copy.deepcopy(plain))
        found = trajectory[part]
        assert type(found) is Trajectory
        assert found == plain[part]
        assert found.tree is trajectory.tree
        assert handles(found) == list(range(count))[part]

    def test_single_steps_are_the_steps_themselves(self) -> None:
        trajectory = Trajectory(steps_of(3))
        assert trajectory[-1] is trajectory[2]
        assert trajectory[1:][0] is trajectory[1]
        with pytest.raises(IndexError):
            trajectory[3]
        with pytest.raises(IndexError):
            trajectory.call_of(3)

    def test_what_a_slice_appends_is_new_in_the_shared_tree_only(self) -> None:
        trajectory = Trajectory(steps_of(3))
        part = trajectory[:1]
        part.append(plain_step([0, 1, 9], [9]))
        assert (len(part), len(trajectory)) == (2, 3)
        assert handles(part) == [0, 3]
        assert trajectory.tree.num_calls == 4
        assert trajectory.tree.num_tokens == 6  # 0 1 2 3 and 9 9

    def test_a_slice_goes_on_by_call_id_or_by_ids(self) -> None:
        trajectory = Trajectory()
        trajectory.append_call(prompt="", completion="", response=make_response([1, 2], [3], 50))
        part = trajectory[:]
        made = make_response([1, 2, 3, 4], [5], 51, extends=50)
        part.append_call(prompt="", completion="", response=made)
        assert part.tree.num_tokens == 5
        assert part[1]["tokens"]["prompt_ids"] == [1, 2, 3, 4]


def shrink(one: Any, step: Any, where: int) -> None:
    if one:
        one.pop(where % len(one))


def put(one: Any, step: Any, where: int) -> None:
    if one:
        one[where % len(one)] = copy.deepcopy(step)


CHANGES: dict[str, Callable[[Any, Any, int], Any]] = {
    "append": lambda one, step, where: one.append(copy.deepcopy(step)),
    "extend": lambda one, step, where: one.extend(copy.deepcopy(step) for _ in range(2)),
    "iadd": lambda one, step, where: one.__iadd__([copy.deepcopy(step)]),
    "insert": lambda one, step, where: one.insert(where, copy.deepcopy(step)),
    "slice": lambda one, step, where: one.__setitem__(slice(where, 2), [copy.deepcopy(step)]),
    "put": put,
    "pop": shrink,
    "reverse": lambda one, step, where: one.reverse(),
    "delete": lambda one, step, where: one.__delitem__(slice(where, where + 1)),
}


class TestChanges:
    @examples(60)
    @given(st.data())
    def test_any_changes_leave_what_a_list_holds(self, data: st.DataObject) -> None:
        trajectory, plain = Trajectory(steps_of(3)), steps_of(3)
        for number in range(data.draw(st.integers(0, 5))):
            step = plain_step([7, number], [number])
            where = data.draw(st.integers(-4, 4))
            action = data.draw(st.sampled_from(sorted(CHANGES)))
            for one in (trajectory, plain):
                CHANGES[action](one, step, where)
        assert trajectory == plain
        assert all(isinstance(step["tokens"], StepTokens) for step in trajectory)
        assert None not in handles(trajectory)
        assert copy.deepcopy(trajectory) == plain
        assert pickle.loads(pickle.dumps(trajectory)) == plain

    def test_joining_is_a_list_of_the_same_steps(self) -> None:
        one, two = Trajectory(steps_of(2)), Trajectory(steps_of(1))
        joined = one + two
        assert joined == steps_of(2) + steps_of(1)
        assert [step["tokens"].tree for step in joined] == [one.tree, one.tree, two.tree]
        assert (len(one), len(two)) == (2, 1)
        whole = Trajectory(joined, tree=one.tree)
        assert handles(whole) == [0, 1, None]  # views on another tree stay views on it

    def test_extending_by_itself_doubles_it(self) -> None:
        trajectory = Trajectory(steps_of(2))
        trajectory.extend(trajectory)
        assert handles(trajectory) == [0, 1, 0, 1]
        assert trajectory.tree.num_calls == 2

    def test_a_refused_step_is_not_in_the_list(self) -> None:
        trajectory = Trajectory(steps_of(1))
        bad = plain_step([1], [2])
        bad["tokens"]["completion_logprobs"] = [float("nan")]
        for add in (
            lambda: trajectory.append(bad),
            lambda: trajectory.extend([bad]),
            lambda: trajectory.insert(0, bad),
            lambda: trajectory.__setitem__(0, bad),
            lambda: trajectory.__setitem__(slice(0, 0), [bad]),
        ):
            with pytest.raises(TokenError, match="placeholder"):
                add()
        assert trajectory == steps_of(1)
        assert trajectory.tree.num_calls == 1

    def test_steps_without_tokens_pass_through(self) -> None:
        empty = {**plain_step([], []), "tokens": None}
        trajectory = Trajectory([empty, *steps_of(1), copy.deepcopy(empty)])
        assert trajectory[0] is empty
        assert handles(trajectory) == [None, 0, None]
        assert pickle.loads(pickle.dumps(trajectory)) == [empty, *steps_of(1), empty]


class TestStreamsOfSteps:
    def test_streams_of_any_shape_ride_on_a_call(self) -> None:
        trajectory = Trajectory()
        experts = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        image = PlacedStream([np.ones((3, 5), np.float16)], [1])
        trajectory.append_call(
            prompt="", completion="",
            response=make_response([1, 2], [3, 4], 1),
            streams={"experts": experts, "image": image, "all": TokenStream(np.arange(4), start=0)},
        )  # fmt: skip
        for tree in (trajectory.tree, pickle.loads(pickle.dumps(trajectory)).tree):
            found: Any = tree.stream("experts", 0)
            assert (found.start, found.values.shape, found.values.dtype) == (2, (2, 3, 4), np.uint8)
            assert np.array_equal(found.values, experts)
            placed: Any = tree.stream("image", 0)
            assert placed.values[0].shape == (3, 5)
            assert np.asarray(placed.positions).tolist() == [1]
            dense: Any = tree.stream("all", 0)
            assert (dense.start, dense.values.tolist()) == (0, [0, 1, 2, 3])

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 3), (1, 1, 1, 1, 1)])
    @pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "?", "u8", "i8"])
    def test_every_item_shape_and_type_comes_back(self, shape: Any, dtype: str) -> None:
        values = np.zeros((3, *shape), dtype)
        values.reshape(-1)[::2] = 1
        trajectory = Trajectory()
        trajectory.append_call(
            prompt="",
            completion="",
            response=make_response([1], [2, 3, 4], 1),
            streams={"x": values},
        )
        found: Any = copy.deepcopy(trajectory).tree.stream("x", 0)
        assert (found.values.dtype, found.values.shape) == (np.dtype(dtype), (3, *shape))
        assert np.array_equal(found.values, values)

    def test_a_refused_stream_leaves_no_step(self) -> None:
        trajectory = Trajectory()
        with pytest.raises(TokenError, match="'x'"):
            trajectory.append_call(
                prompt="", completion="",
                response=make_response([1], [2, 3], 1), streams={"x": np.zeros(3)},
            )  # fmt: skip
        assert len(trajectory) == trajectory.tree.num_calls == 0
        trajectory.append_call(
            prompt="", completion="",
            response=make_response([1], [2, 3], 1), streams={"x": np.zeros((2, 2), np.int64)},
        )  # fmt: skip
        assert trajectory.tree.stream("x", 0) is not None  # the name was not taken by the refused
