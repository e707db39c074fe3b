"""The loop with several ranks, with adapters, and asked to stop."""

import asyncio
import os
import signal
import threading
import time

import pytest
import torch
from loop_cases import CASES
from loop_kit import curve, make_config, make_model, start
from ranks_kit import LIMIT_S, run_worlds
from training_kit import FLOAT32, LetterSource, group, tiny_model, tree

from rolltree.inference.models import load_model
from rolltree.store import Run
from rolltree.training import Checkpoints, Silent, Trainer, load_train_config
from rolltree.training.checkpoint_formats import trained_tensors
from rolltree.training.launch import stop_on_sigterm
from rolltree.training.models.lora import adapters_off, add_adapter, peft_name
from rolltree.training.models.plain_weights import copy_weights, plain_tensors
from rolltree.training.optim import Optimizer
from rolltree.training.rank0 import COMMANDS
from rolltree.values.errors import ConfigError, Stopped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),  # the first test waits for all worlds
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def results(folder):
    return run_worlds("loop_cases", folder)


class TestRanks:
    @pytest.mark.parametrize("name", [name for name in CASES if name != "asynchronous"])
    def test_two_ranks_learn_what_one_process_learns(self, results, name):
        alone, together = results["runs/1"][name], results["runs/2"][name]
        assert len(alone) == len(together) == 4
        for one, two in zip(alone, together, strict=True):
            assert two == pytest.approx(one, rel=1e-3, abs=1e-4)

    def test_the_engine_samples_from_the_gathered_weights(self, results):
        for size in (1, 2):
            for name, steps in results[f"runs/{size}"].items():
                assert all(step[-1] < 1e-4 for step in steps), (size, name)

    def test_a_copy_that_differs_from_the_shards_is_found(self, results):
        assert "it serves other weights" in results["corrupted/2"]

    def test_generation_goes_on_while_two_ranks_step(self, results):
        assert len(results["runs/2"]["asynchronous"]) == 4

    @pytest.mark.parametrize("name", ["plain", "lora"])
    def test_the_export_is_the_last_checkpoint(self, results, folder, name):
        exported, _ = load_model(str(folder / f"{name}-2" / "model"))
        model, _ = load_model(str(folder / "model"))
        config = load_train_config({"model": {"lora_rank": 4}}) if name == "lora" else None
        if config is not None:
            add_adapter(model, config.model, 5)
        store = Checkpoints(folder / f"{name}-2" / "checkpoints")
        trainer = Trainer(model, load_train_config({}))
        assert store.load(store.latest(), model, trainer.optimizer).step == 4
        wanted = dict(plain_tensors(model))
        for key, tensor in exported.named_parameters():
            assert torch.allclose(tensor, wanted[key], atol=FLOAT32)

    def test_a_killed_follower_ends_the_run_and_the_same_command_continues_it(self, results):
        found = results["loses_a_follower/1"]
        assert found["codes"] == [3, -signal.SIGKILL]
        assert found["second"]
        assert "Connection" in found["message"] or "ended" in found["message"]
        assert found["steps"] == 4

    def test_every_command_has_a_row(self):
        assert set(COMMANDS) == {"step", "save", "load", "copy", "score", "export"}


class TestLora:
    def adapted(self, seed=0, kind="qwen3", **section):
        model = tiny_model(kind)
        config = load_train_config(
            {
                "model": {"lora_rank": 2, **section},
                "train": {"max_mismatch": 1e9, "max_tokens": 64},
                "optim": {"lr": 1e-2},
            }
        )
        add_adapter(model, config.model, seed)
        return model, Trainer(model, config)

    def test_only_adapters_train(self):
        model, trainer = self.adapted()
        plain = {name: tensor.clone() for name, tensor in tiny_model().named_parameters()}
        assert all(".lora_" in name for name, _ in trainer.optimizer.named)
        assert set(trained_tensors(model)) == {name for name, _ in trainer.optimizer.named}
        for name, tensor in plain_tensors(model):
            assert torch.equal(tensor, plain[name])  # B starts at 0
        trainer.step([tree(group())], 1)
        moved = {name for name, tensor in plain_tensors(model) if not tensor.equal(plain[name])}
        assert moved == {name for name in plain if name.endswith("_proj.weight")}
        base = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
        assert all(torch.equal(base[name], plain[name]) for name in plain)

    def test_targets_scale_and_seed(self):
        model, trainer = self.adapted(lora_targets=["q_proj"], lora_alpha=6.0)
        assert {name.split(".")[4] for name, _ in trainer.optimizer.named} == {"q_proj"}
        module = model.model.layers[0].self_attn.q_proj
        assert module.scaling["default"] == 3.0
        one, two, other = (dict(self.adapted(seed)[0].named_parameters()) for seed in (1, 1, 2))
        name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])
        assert peft_name(name) == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"

    @pytest.mark.parametrize("kind", ["qwen3", "llama"])
    def test_the_copy_computes_what_the_adapted_model_computes(self, kind):
        model, trainer = self.adapted(kind=kind)
        trainer.step([tree(group())], 1)
        served = tiny_model(kind, seed=3)
        copy_weights(model, served)
        copy_weights(model, None)  # a rank without a copy
        ids = torch.tensor([[4, 8, 15, 16, 23, 42]])
        assert torch.allclose(served(ids).logits, model(ids).logits, atol=FLOAT32)
        before = tiny_model(kind)(ids).logits
        assert not torch.allclose(model(ids).logits, before, atol=1e-2)

    @pytest.mark.parametrize("kl", ["k3", "reward", "full"])
    def test_the_reference_is_the_model_below_the_adapters(self, kl):
        found = []
        for reference in (None, tiny_model()):
            model = tiny_model()
            config = load_train_config(
                {
                    "model": {"lora_rank": 2},
                    "algorithm": {"kl_coef": 0.5, "kl": kl},
                    "train": {"max_mismatch": 1e9, "max_tokens": 64},
                    "optim": {"lr": 1e-2},
                }
            )
            add_adapter(model, config.model, 0)
            trainer = Trainer(model, config, reference=reference)
            assert (trainer.reference.model is model) == (reference is None)
            metrics = [trainer.step([tree(group())], step) for step in (1, 2, 3)]
            found.append((metrics[-1]["train/kl"], *(p.detach() for p in model.parameters())))
        assert found[0][0] > 1e-4
        for own, copied in zip(*found, strict=True):
            assert torch.allclose(torch.as_tensor(own), torch.as_tensor(copied), atol=FLOAT32)

    def test_the_adapters_are_on_again_when_a_pass_breaks(self):
        model, trainer = self.adapted()
        trainer.step([tree(group())], 1)
        ids = torch.tensor([[4, 8, 15, 16, 23, 42]])
        adapted, plain = model(ids).logits, tiny_model()(ids).logits

        def broken():
            with adapters_off(model):
                assert torch.equal(model(ids).logits, plain)
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            broken()
        assert torch.equal(model(ids).logits, adapted)

    def test_a_tree_gives_the_gradient_of_its_rows(self):
        from training_kit import flat

        gradients = []
        for samples in ([tree(group())], [flat(call) for call in group()]):
            _, trainer = self.adapted()
            for _, parameter in trainer.optimizer.named:
                torch.nn.init.normal_(parameter, generator=torch.manual_seed(1))
            trainer.step(samples, 1)
            state = trainer.optimizer.tensors()
            gradients.append(torch.cat([v.flatten() for k, v in state.items() if "avg/" in k]))
        difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
        assert float(difference) < FLOAT32

    def test_a_target_that_is_no_linear_layer_is_refused(self):
        with pytest.raises(ConfigError, match=r"'q_porj'.* Did you mean 'q_proj'"):
            self.adapted(lora_targets=["q_porj"])
        with pytest.raises(ConfigError, match="lm_head"):
            self.adapted(lora_targets=["lm_head"])

    @pytest.mark.parametrize("section", [{"lora_alpha": 8.0}, {"lora_targets": ["q_proj"]}])
    def test_settings_without_a_rank_are_refused(self, section):
        with pytest.raises(ConfigError, match="no adapter would read it"):
            load_train_config({"model": section})
        with pytest.raises(ConfigError, match=r"model.lora_rank is -1"):
            load_train_config({"model": {"lora_rank": -1}})

    def test_a_missing_peft_is_said(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "peft", None)
        with pytest.raises(ConfigError, match=r"pip install 'rolltree\[train\]'"):
            self.adapted()


def interrupt(loop, until):
    """Press Ctrl-C from another thread, and wait until the main thread has handled it."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    ends = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < ends, "the signal was not handled"
        # A signal in the moment before the loop sleeps does not wake it.
        loop.call_soon_threadsafe(lambda: None)
        time.sleep(0.01)


class TestStopping:
    def run(self, path, tmp_path, ahead=0, **options):
        model = make_model(tmp_path / "model")
        config = make_config(
            model,
            path,
            train={"num_steps": 5, "async_steps": ahead},
            checkpoint={"every": 100, "export": False},
        )
        return start(config, LetterSource(), **options)

    @pytest.mark.parametrize("event", ["on_step", "on_rollouts"])
    def test_a_cancelled_run_saves_and_goes_on(self, tmp_path, event):
        class Cancel(Silent):
            """Cancels the run's task in the third step: while sampling, or right after it."""

            def on_start(self, start):
                self.task = asyncio.current_task()

            def tick(self, step, *rest):
                if step == 3:
                    self.task.cancel()

        setattr(Cancel, event, Cancel.tick)
        with pytest.raises(asyncio.CancelledError):
            self.run(tmp_path / "run", tmp_path, reporter=Cancel())
        done = 3 if event == "on_step" else 2
        store = Checkpoints(tmp_path / "run" / "checkpoints")
        assert store.latest().name == f"step-{done:06d}"
        with Run.open(tmp_path / "run", "r") as run:
            assert len(list(run.steps())) == done
        again = self.run(tmp_path / "run", tmp_path)
        whole = self.run(tmp_path / "whole", tmp_path)
        for one, two in zip(curve(again), curve(whole), strict=True):
            assert one == pytest.approx(two, rel=1e-3, abs=1e-4)

    def test_weights_that_a_step_is_writing_are_not_saved(self, tmp_path, monkeypatch):
        """Ctrl-C twice while the optimizer writes in its thread: the second one does not wait."""
        original, calls = Optimizer.step, []

        class Watch(Silent):
            def on_start(self, start):
                self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()

        watch = Watch()

        def interrupted(self, lr):
            calls.append(lr)
            if len(calls) == 3:
                # A second signal before the first is handled would merge with it, and a step that
                # ends before the second is handled is saved: wait for what each of them does.
                interrupt(watch.loop, until=watch.task.cancelling)
                interrupt(watch.loop, until=watch.task.done)
            original(self, lr)

        monkeypatch.setattr(Optimizer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path / "run", tmp_path, ahead=1, reporter=watch)
        assert len(calls) == 3
        assert Checkpoints(tmp_path / "run" / "checkpoints").latest() is None
        assert len(self.run(tmp_path / "run", tmp_path, ahead=1).metrics) == 5

    async def test_sigterm_becomes_an_error_of_its_own(self):
        async def wait():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

        with pytest.raises(Stopped, match="same command continues"), stop_on_sigterm():
            await wait()
        await asyncio.sleep(0)  # the task is not cancelled any more
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    async def test_other_cancellations_stay_what_they_are(self):
        async def inner():
            with stop_on_sigterm():
                await asyncio.sleep(60)

        task = asyncio.create_task(inner())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
