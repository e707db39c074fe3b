"""The tree against a naive model, in any order of insertions, merges, saves and reloads."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tokens_kit import NaiveCall, NaiveTree, examples, ids, logprobs_for

from rolltree.tokens import TokenTree


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TokenTree()
        self.naive = NaiveTree()
        self.saved: list[bytes] = []
        self.num_saved = 0
        self.has_merged = False

    def _call(self, prompt: list[int], completion: list[int], draw: int) -> NaiveCall:
        call = NaiveCall(
            prompt=prompt,
            completion=completion,
            logprobs=None if draw % 5 == 0 else logprobs_for(completion, draw),
            mask=[float((draw + i) % 3 != 0) for i in range(len(completion))],
            version=draw % 4,
            agent="abc"[draw % 3],
            turn=None if draw % 2 else draw,
        )
        self.naive.calls.append(call)
        return call

    def _labels(self, call: NaiveCall) -> dict[str, object]:
        return {
            "logprobs": call.logprobs,
            "mask": call.mask,
            "versions": call.version,
            "agent": call.agent,
            "turn": call.turn,
        }

    @rule(prompt=ids, completion=ids, draw=st.integers(0, 40))
    def insert_anything(self, prompt: list[int], completion: list[int], draw: int) -> None:
        call = self._call(prompt, completion, draw)
        handle = self.tree.insert(prompt, completion, **self._labels(call))  # type: ignore[arg-type]
        assert handle == len(self.naive.calls) - 1

    @precondition(lambda self: self.naive.calls)
    @rule(data=st.data(), suffix=ids, completion=ids, hinted=st.integers(0, 2))
    def extend_a_call(
        self, data: st.DataObject, suffix: list[int], completion: list[int], hinted: int
    ) -> None:
        parent = data.draw(st.integers(0, len(self.naive.calls) - 1))
        prompt = self.naive.calls[parent].path + suffix
        labels = self._labels(self._call(prompt, completion, parent))
        if hinted == 0:
            self.tree.insert(prompt, completion, **labels)  # type: ignore[arg-type]
        elif hinted == 1:
            array = np.array(prompt, np.int32)
            self.tree.insert(array, completion, parent=parent, **labels)  # type: ignore[arg-type]
        else:
            self.tree.insert_suffix(parent, suffix, completion, **labels)  # type: ignore[arg-type]

    @precondition(lambda self: self.naive.calls)
    @rule(data=st.data(), completion=ids)
    def edit_history(self, data: st.DataObject, completion: list[int]) -> None:
        path = data.draw(st.sampled_from(self.naive.calls)).path
        cut = data.draw(st.integers(0, len(path)))
        skip = data.draw(st.integers(0, 3))
        self.insert_anything(path[:cut] + path[cut + skip :], completion, cut)

    @rule(calls=st.lists(st.tuples(ids, ids), max_size=4))
    def merge_another(self, calls: list[tuple[list[int], list[int]]]) -> None:
        other = TokenTree()
        for draw, (prompt, completion) in enumerate(calls):
            labels = self._labels(self._call(prompt, completion, draw))
            other.insert(prompt, completion, **labels)  # type: ignore[arg-type]
        first = self.tree.merge(other)
        self.has_merged = True
        assert first == len(self.naive.calls) - len(calls)

    @rule()
    def save_what_is_new(self) -> None:
        self.saved.append(self.tree.to_bytes(since=self.num_saved))
        self.num_saved = self.tree.num_calls

    @rule()
    def reload(self) -> None:
        self.save_what_is_new()
        self.tree = TokenTree.from_bytes(b"".join(self.saved))

    @rule(wanted=ids)
    def find(self, wanted: list[int]) -> None:
        assert self.tree.find(wanted) == self.naive.find(wanted)

    @invariant()
    def agrees_with_the_naive_model(self) -> None:
        tree = self.tree
        assert tree.num_calls == len(self.naive.calls)
        assert tree.num_tokens == self.naive.num_tokens
        for handle, call in enumerate(self.naive.calls):
            assert tree.prompt_ids(handle).tolist() == call.prompt
            assert tree.completion_ids(handle).tolist() == call.completion
            logprobs = tree.logprobs(handle)
            assert (None if logprobs is None else logprobs.tolist()) == call.logprobs
            assert tree.mask(handle).tolist() == call.mask
            assert set(tree.versions(handle).tolist()) <= {call.version}
            assert (tree.agent(handle), tree.turn(handle)) == (call.agent, call.turn)
            known = NaiveTree(self.naive.calls[:handle]).find(call.prompt)
            bound = tree.known_prompt_len(handle)
            assert bound >= known if self.has_merged else bound == known

    @invariant()
    def runs_tile_the_arena(self) -> None:
        arena = self.tree.arena
        ends = [arena.run_end(run) for run in range(arena.num_runs)]
        assert [0, *ends[:-1]] == list(arena.run_start) or not ends
        assert all(low < high for low, high in zip(arena.run_start, ends, strict=True))
        children = [
            (arena.run_parent[run], int(arena.ids[arena.run_start[run]]))
            for run in range(arena.num_runs)
        ]
        assert len(set(children)) == len(children)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = examples(120, stateful_step_count=25)
