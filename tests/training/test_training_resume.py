"""Checkpoints written by two ranks and read by one to four, and ranks killed while they write."""

import pytest
import torch
from checkpoint_cases import CONTENTS, KINDS, data, made
from ranks_kit import LIMIT_S, run_worlds
from safetensors.torch import load_file
from training_kit import FLOAT32, tiny_model

from rolltree.training import Checkpoints, Trainer, TrainState
from rolltree.training.layout import collate
from rolltree.values.errors import TrainingError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),  # the first test waits for all worlds
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def results(folder):
    return run_worlds("checkpoint_cases", folder)


@pytest.mark.long
class TestResharding:
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_saved_at_two_ranks_resumed_at(self, results, size):
        found = results[f"resumed/{size}"]
        assert set(found) == {f"{kind}-{content}" for kind in KINDS for content in CONTENTS}
        for name, (step, loaded, later) in found.items():
            assert step == 2
            assert loaded == 0, name
            assert later < FLOAT32, name

    def test_every_rank_wrote_its_own_part(self, results):
        assert len(results["saved/2"]) == 2

    def test_three_steps_moved_the_weights(self, results, folder):
        for kind in KINDS:
            saved, last = (load_file(folder / f"{kind}-{n}.safetensors") for n in ("saved", "last"))
            moved = max(float((last[name] - saved[name]).abs().max()) for name in saved)
            assert moved > 1e-3

    def test_two_parameter_groups_were_saved(self, results):
        groups = made("tied", None).optimizer._adam.param_groups
        assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.1]

    def test_another_kind_of_model_is_refused(self, results, folder):
        tied, adapted = made("tied", None), made("lora", None)
        for content in CONTENTS:
            store = Checkpoints(folder / f"lora-{content}")
            with pytest.raises(TrainingError, match="another model"):
                store.load(store.latest(), tied.model, tied.optimizer)
            store = Checkpoints(folder / f"tied-{content}")
            with pytest.raises(TrainingError, match="another model"):
                store.load(store.latest(), adapted.model, adapted.optimizer)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_export_of_two_ranks_is_the_trained_model(self, results, folder, kind):
        from transformers import AutoModelForCausalLM

        trainer = made(kind, None, fresh=True)
        store = Checkpoints(folder / f"{kind}-full")
        store.load(store.latest(), trainer.model, trainer.optimizer)
        (forest,) = (collate(data(1)[:1]),)
        exported = AutoModelForCausalLM.from_pretrained(folder / kind / "model")
        with torch.no_grad(), trainer.logprobs.context():
            wanted = trainer.logprobs(forest).logprob
        found = Trainer(exported, trainer.config).logprobs
        with torch.no_grad(), found.context():
            got = found(forest).logprob
        assert float((got - wanted).abs().max()) < FLOAT32
        assert (folder / kind / "adapter").is_dir() == (kind == "lora")

    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
    def test_adapters_are_in_pefts_layout(self, results, folder):
        from peft import PeftModel

        trainer = made("lora", None, fresh=True)
        store = Checkpoints(folder / "lora-full")
        store.load(store.latest(), trainer.model, trainer.optimizer)
        ids = torch.tensor([[1, 5, 9, 2]])
        plain = tiny_model(num_hidden_layers=1)(ids).logits
        for path in (store.latest(), folder / "lora" / "adapter"):
            found = PeftModel.from_pretrained(tiny_model(num_hidden_layers=1), path)(ids).logits
            assert torch.allclose(found, trainer.model(ids).logits, atol=FLOAT32)
            assert not torch.allclose(found, plain, atol=1e-3)
        assert not (store.latest() / "model.safetensors").exists()


@pytest.mark.long
class TestKills:
    @pytest.mark.parametrize(
        ("case", "least"),
        [
            ("kills_1_0_full/1", 15),
            ("kills_1_0_sharded/1", 15),
            ("kills_2_0_full/1", 15),
            ("kills_2_0_sharded/1", 15),
            ("kills_2_1_sharded/1", 2),
        ],
    )
    def test_a_kill_of_any_rank_leaves_a_complete_checkpoint(self, results, case, least):
        victim = int(case.split("_")[2])
        *killed, last = results[case]
        assert len(killed) >= least
        for codes, step, distance, left in killed:
            assert codes[victim] == -9
            assert all(code == 1 for rank, code in enumerate(codes) if rank != victim)
            assert step in (1, 2)
            assert distance == 0
            assert left == ["latest", "step-000003"]  # the next save cleaned up
        steps = [outcome[1] for outcome in results[case]]
        assert steps == sorted(steps)
        assert steps[0] == 1
        assert (last[0], last[1]) == ([0] * len(last[0]), 2)


def test_one_process_reads_what_it_wrote_in_the_other_format(tmp_path):
    trainer = made("tied", None)
    trainer.step(data(1), 1)
    store = Checkpoints(tmp_path, content="sharded")
    path = store.save(trainer.model, trainer.optimizer, TrainState(1, 1))
    again = made("tied", None, fresh=True)
    state = Checkpoints(tmp_path, content="full").load(path, again.model, again.optimizer)
    assert state.step == 1
    for one, two in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
