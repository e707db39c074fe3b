"""Several ranks on gloo, real processes: the gradient and the step of one rank."""

from dataclasses import replace

import numpy as np
import pytest
from gradient_cases import AT_THREE, CASES
from ranks_kit import LIMIT_S, run_worlds
from torch.distributed.fsdp import FSDPModule
from training_kit import FLOAT32, Call, flat, group, tree

from rolltree.samples import SampleStream
from rolltree.training.models.ranks import (
    decode,
    encode,
    samples_from_data,
    samples_to_data,
    start_ranks,
)
from rolltree.values.errors import ConfigError
from rolltree.values.types import Records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),  # the first test waits for all worlds
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_worlds("gradient_cases", tmp_path_factory.mktemp("worlds"))


class TestGradients:
    @pytest.mark.parametrize("size", [2, 3])
    def test_ranks_give_the_gradient_of_one_rank(self, results, size):
        found = results[f"gradients/{size}"]
        assert set(found) == set(CASES if size == 2 else AT_THREE)
        for name, case in found.items():
            assert case["gradient"] < FLOAT32, name
            assert case["norm"] < FLOAT32, name
            assert case["metrics"] < FLOAT32, name

    @pytest.mark.parametrize("size", [2, 3])
    def test_and_its_weights_after_two_steps(self, results, size):
        for name, case in results[f"gradients/{size}"].items():
            assert case["weights"] < FLOAT32, name
            assert case["step_metrics"] < 1e-4, name

    @pytest.mark.parametrize("size", [2, 3])
    def test_the_work_and_the_memory_are_shared(self, results, size):
        cases = results[f"gradients/{size}"]
        assert cases["grpo"]["packs"] == [1, 2]
        for case in cases.values():
            assert case["local"] < case["all"] / size * 1.1

    def test_bfloat16_rounds_like_one_rank_and_keeps_float32_weights(self, results):
        found = results["bfloat16/2"]
        assert found["master"] == ["torch.float32"]
        assert 1e-4 < found["together"] < 5 * found["alone"]
        assert found["together"] < 0.05


class TestRanks:
    def test_one_process_is_alone(self, results, monkeypatch):
        assert results["nothing/1"] == [True, False]
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        with start_ranks() as ranks:
            assert ranks is None

    def test_a_device_without_a_backend_is_refused(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"model.device is 'mps'"), start_ranks("mps"):
            pass

    def test_a_world_without_torchrun_is_refused(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(ConfigError, match="RANK is not set"), start_ranks():
            pass

    def test_a_torch_whose_ranks_wait_for_missing_gradients_is_refused(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
        with pytest.raises(ConfigError, match=r"need torch 2.13"), start_ranks():
            pass

    def test_commands_arrive(self, results):
        assert results["commands/2"] == [2, 2, 2]

    def test_weights_are_found_after_a_pass_without_a_backward_one(self, results):
        assert results["looked/2"] == [0.0, 0.0]

    def test_the_copy_of_a_sharded_mixture_has_the_adapters_of_its_experts(self, results):
        away, moved = results["merged/2"]
        assert away < FLOAT32 < 0.05 < moved

    def test_a_rank_with_masked_calls_only_takes_part_in_the_step(self, results):
        found = results["masked/2"]
        assert found["away"] < FLOAT32
        together, alone = found["found"]
        assert together == pytest.approx(alone, rel=1e-4)
        assert together[:2] == [4.0, 10.0]

    def test_a_non_finite_step_stops_every_rank_and_changes_nothing(self, results):
        found = results["failures/2"]
        assert found["raised"] == found["unchanged"] == 2
        assert "rollouts r77" in found["messages"][0]
        assert np.isfinite(found["loss"])


def columns_of(records):
    columns = {name: getattr(records, name) for name in Records.__dataclass_fields__}
    return columns | columns.pop("extra")


class TestWire:
    def test_samples_come_back(self):
        calls = group(num=3)
        stream = SampleStream(np.array([1, 3], np.int32), np.array([0.5, 0.25]))
        placed = SampleStream(np.array([2], np.int32), (np.ones((2, 2), np.float16),))
        first = flat(Call([1], [2, 3]))
        first.info.update(streams={"a": stream, "b": placed})
        advice = {"advice": np.array([0.5, -1.0], np.float32)}
        first = replace(first, records=replace(first.records, extra=advice))
        sent = [first, tree(calls)]
        back = samples_from_data(decode(encode(samples_to_data(sent))))
        for old, new in zip(sent, back, strict=True):
            assert old.origins == new.origins
            for name in ("ids", "positions", "subtree_end"):
                np.testing.assert_array_equal(getattr(old, name), getattr(new, name))
            ours, theirs = columns_of(old.records), columns_of(new.records)
            assert ours.keys() == theirs.keys()
            for name, one in ours.items():
                assert one.dtype == theirs[name].dtype
                np.testing.assert_array_equal(one, theirs[name])
        streams = back[0].info["streams"]
        np.testing.assert_array_equal(streams["a"].values, [0.5, 0.25])
        assert isinstance(streams["b"].values, tuple)
        assert streams["b"].values[0].dtype == np.float16
        assert streams["b"].values[0].shape == (2, 2)

    def test_plain_values_and_refusals(self):
        data = {"a": [1, None, "é"], "b": np.float32(0.5), "empty": np.empty((0, 3), np.int8)}
        back = decode(encode(data))
        assert back["a"] == [1, None, "é"]
        assert back["b"] == 0.5
        assert back["empty"].shape == (0, 3)
        with pytest.raises(NotImplementedError, match="object cannot be sent"):
            encode({"x": object()})
