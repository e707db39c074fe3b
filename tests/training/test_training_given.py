"""A model that is given as an object outlives the call, and the same call continues the run."""

import warnings

import peft
import pytest
import torch
from loop_kit import make_config
from training_kit import LetterSource

import rolltree as rt
from rolltree.training import Optimizer
from rolltree.values.errors import ConfigError

SECTIONS = {
    "plain": {},
    "kl": {"algorithm": {"group_size": 3, "groups_per_step": 2, "kl_coef": 0.1}},
    "lora": {"optim": {"lr": 5e-2}},
}


def train(model, run, parts, *, num_steps=4, kind="plain", **options):
    sections = {"engine": {"max_batch": 8, "max_context": 128, "batch_invariant": True}}
    config = make_config(model, run, **sections, **SECTIONS[kind])
    options = {"environment": LetterSource(), "reporter": rt.Silent(), **options}
    options |= {"lora_rank": 2} if kind == "lora" else {}
    return rt.train(config, num_steps=num_steps, **parts, **options)


def load(model):
    module, tokenizer = rt.load_model(str(model))
    return {"model": module, "tokenizer": tokenizer}


def learned(report):
    names = ("train/kl", "train/loss", "train/grad_norm", "reward/mean", "train/entropy")
    return [[step.get(name) for name in names] for step in report.metrics]


class Die(rt.Silent):
    def __init__(self, step):
        self.step = step

    def on_step(self, step, metrics):
        if step == self.step:
            raise RuntimeError("the lights went out")


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """What a run learns that was never interrupted, by kind."""
    folder = tmp_path_factory.mktemp("straight")
    return {k: learned(train(model, folder / k, load(model), kind=k)) for k in SECTIONS}


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_same_object_continues_the_run(model, tmp_path, straight, kind):
    """Its trained weights are neither the reference of the KL nor below new adapters."""
    parts = load(model)
    train(model, tmp_path / "run", parts, num_steps=2, kind=kind)
    assert learned(train(model, tmp_path / "run", parts, kind=kind)) == straight[kind]


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_an_error_before_the_first_checkpoint(model, tmp_path, straight, kind):
    """The run begins again with the weights that it began with, not with those of step 3."""
    parts, options = load(model), {"checkpoint_every": 10, "kind": kind}
    with pytest.raises(RuntimeError, match="lights"):
        train(model, tmp_path / "run", parts, reporter=Die(3), **options)
    assert learned(train(model, tmp_path / "run", parts, **options)) == straight[kind]


def test_gradients_of_a_step_that_failed_are_not_added(model, tmp_path, straight, monkeypatch):
    parts, clip = load(model), Optimizer.clip

    def fail(self):
        monkeypatch.setattr(Optimizer, "clip", clip)
        raise MemoryError("in the middle of a step")

    monkeypatch.setattr(Optimizer, "clip", fail)
    with pytest.raises(MemoryError):
        train(model, tmp_path / "run", parts)
    assert any(p.grad is not None for p in parts["model"].parameters())
    assert learned(train(model, tmp_path / "run", parts)) == straight["plain"]


def test_an_engine_and_a_client_that_were_given_survive(model, tmp_path, straight):
    parts = load(model)
    client = rt.local_client(
        *parts.values(), max_batch=8, max_context=128, batch_invariant=True, seed=0
    )
    parts |= {"client": client, "engine": client.engine}
    options = {"checkpoint_every": 10, "environment": LetterSource()}
    with pytest.raises(RuntimeError, match="lights"):
        train(model, tmp_path / "run", parts, reporter=Die(3), **options)
    assert learned(train(model, tmp_path / "run", parts, **options)) == straight["plain"]


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_another_model_is_refused(model, tmp_path, kind):
    """Also if the run has its first weights: they are not put over those of an unknown object."""
    parts = load(model)
    with pytest.raises(RuntimeError, match="lights"):
        train(model, tmp_path / "run", parts, kind=kind, reporter=Die(1))
    other = load(model)
    first = next(other["model"].parameters())
    with torch.no_grad():
        first.mul_(1.5)
    before = first.detach().clone()
    with pytest.raises(ConfigError, match="other weights than"):
        train(model, tmp_path / "run", other, kind=kind)
    assert torch.equal(first, before)


def test_another_run_says_where_it_starts(model, tmp_path):
    parts, notices = load(model), []

    class Note(rt.Silent):
        def on_notice(self, message):
            notices.append(message)

    train(model, tmp_path / "a", parts, num_steps=1)
    trained = parts["model"].state_dict()["model.norm.weight"].clone()
    train(model, tmp_path / "b", parts, num_steps=1, reporter=Note())
    assert any(str(tmp_path / "a") in each for each in notices)
    # and the first one goes on from its own weights
    again = train(model, tmp_path / "a", parts, num_steps=1)
    assert len(again.metrics) == 1
    assert torch.equal(parts["model"].state_dict()["model.norm.weight"], trained)


def test_the_object_is_what_was_trained(model, tmp_path):
    """Evaluated after training, with adapters or without, it gives the exported model's logits."""
    for kind in ("plain", "lora"):
        parts, ids = load(model), torch.arange(1, 9)[None]
        before = parts["model"](input_ids=ids).logits.detach()
        report = train(
            model, tmp_path / kind, parts, num_steps=2, kind=kind, checkpoint_export=True
        )
        exported = rt.load_model(str(report.model_path))[0]
        found = parts["model"](input_ids=ids).logits
        assert (found - exported(input_ids=ids).logits).abs().max() < 1e-4
        assert (found - before).abs().max() > 1e-3


class TestPeftModel:
    def wrapped(self, model, **settings):
        parts = load(model)
        config = peft.LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj", "down_proj"],
            task_type="CAUSAL_LM",
            **settings,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers of peft, peft of biases
            return parts | {"model": peft.get_peft_model(parts["model"], config)}

    def test_its_adapter_is_trained_and_goes_on(self, model, tmp_path):
        """An adapter that knows something already: it begins there, also after an error."""
        parts, ids = self.wrapped(model), torch.arange(1, 9)[None]
        torch.manual_seed(0)
        for name, parameter in parts["model"].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        weight = parts["model"].get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
        base = weight.detach().clone()
        options = {"optim_lr": 5e-2, "checkpoint_every": 10, "checkpoint_export": True}
        with pytest.raises(RuntimeError, match="lights"):
            train(model, tmp_path / "run", parts, num_steps=2, reporter=Die(1), **options)
        report = train(model, tmp_path / "run", parts, num_steps=2, **options)
        assert report.metrics[0]["train/sampling/sampling_logp_difference/mean"] < 1e-5
        assert report.metrics[0]["train/grad_norm"] > 0
        assert torch.equal(weight, base)
        exported = rt.load_model(str(report.model_path))[0]
        found = parts["model"](input_ids=ids).logits - exported(input_ids=ids).logits
        assert found.abs().max() < 1e-4
        with report.run as run:
            assert run.config["model"]["lora_rank"] == 2

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"use_dora": True}, "use_dora = True"),
            ({"bias": "all"}, "bias = 'all'"),
            ({"lora_bias": True}, "lora_bias = True"),
            ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices = \[1, 2\]"),
        ],
    )
    def test_what_cannot_be_trained_is_named(self, model, tmp_path, settings, message):
        with pytest.raises(ConfigError, match=message):
            train(model, tmp_path / "run", self.wrapped(model, **settings))
        with pytest.raises(ConfigError, match=r"lora_rank is 3, and the model .* rank 2"):
            train(model, tmp_path / "run", self.wrapped(model), lora_rank=3)

    def test_what_transformers_added_is_checked_too(self, model, tmp_path):
        parts = load(model)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the bias
            try:
                parts["model"].add_adapter(config)
            except ValueError as error:
                if "version of PEFT" not in str(error):
                    raise
                pytest.skip(f"transformers takes only newer adapters: {error}")
        with pytest.raises(ConfigError, match="lora_bias = True"):
            train(model, tmp_path / "run", parts)

    def test_a_kl_to_an_adapter_needs_a_copy(self, model, tmp_path):
        parts = self.wrapped(model, init_lora_weights=False)
        with pytest.raises(ConfigError, match="folder with the merged model"):
            train(model, tmp_path / "run", parts, kind="kl")
