"""The probe that decides whether a model may be trained on trees."""

import torch
from training_kit import SIZES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.training import tree_probe
from rolltree.training.tree_probe import SHAPE, first_layers, paths_of, probe_forest
from rolltree.training.tree_support import why_not_tree


def made(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, "pad_token_id": 0, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_forest_has_the_shape_that_was_asked_for():
    forest = probe_forest(61, (2, ((1, ()), (3, ((1, ()),)))))
    assert forest.positions.tolist() == [0, 1, 2, 2, 3, 4, 5]
    assert forest.subtree_end.tolist() == [7, 7, 3, 7, 7, 7, 7]
    assert [path.tolist() for path in paths_of(forest)] == [[0, 1, 2], [0, 1, 3, 4, 5, 6]]
    longest = max(len(path) for path in paths_of(probe_forest(61, SHAPE)))
    assert longest > 64 + 8


class TestWhatFreshWeightsHide:
    """Each of these changes nothing in a fresh model, or within a few tokens."""

    def test_doge(self):
        assert why_not_tree(made("doge")) is not None

    def test_a_gate_that_starts_at_zero(self):
        model = tiny_model()
        mlp = model.model.layers[0].mlp
        mlp.gate = torch.nn.Parameter(torch.zeros(32))
        mlp.register_forward_hook(lambda m, i, out: out + m.gate * out.roll(1, dims=1))
        assert "differ" in why_not_tree(model)

    def test_something_that_happens_far_from_the_start(self):
        model = tiny_model()

        def leak(module, args, out):
            return torch.cat([out[:, :64], out[:, 64:] + out[:, :-64]], 1)

        model.model.layers[0].mlp.register_forward_hook(leak)
        assert "differ" in why_not_tree(model)

    def test_a_gradient_that_is_another_one(self):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * (2 if grad.shape[1] > 120 else 1)  # the tree has more tokens

        model = tiny_model()
        model.model.layers[1].mlp.register_forward_hook(lambda m, i, out: Twice.apply(out))
        assert "gradients" in why_not_tree(model)


def test_a_crash_is_a_reason():
    model = tiny_model()

    def crash(module, args, out):
        raise KeyError("kaboom")

    model.model.layers[0].mlp.register_forward_hook(crash)
    assert "KeyError('kaboom')" in why_not_tree(model)


def test_the_model_and_its_configuration_are_not_touched():
    model = tiny_model(num_hidden_layers=4)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    tensors = [id(p) for p in model.parameters()]
    assert why_not_tree(model) is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert [id(p) for p in model.parameters()] == tensors
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class TestFirstLayers:
    def test_layers_of_one_kind_are_asked_twice(self):
        model = tiny_model(num_hidden_layers=6)
        short = first_layers(model)
        assert (len(short.model.layers), short.config.num_hidden_layers) == (2, 2)
        assert (len(model.model.layers), model.config.num_hidden_layers) == (6, 6)
        assert {id(p) for p in short.parameters()} < {id(p) for p in model.parameters()}

    def test_as_many_as_it_takes_to_have_every_kind(self):
        sliding = ["full_attention"] * 3 + ["sliding_attention"] + ["full_attention"] * 2
        model = tiny_model(
            num_hidden_layers=6, layer_types=sliding, use_sliding_window=True, sliding_window=8
        )
        assert len(first_layers(model).model.layers) == 4

    def test_a_layer_that_cannot_be_left_out(self, monkeypatch):
        asked = []
        real = tree_probe._compare

        def compare(trial, first):
            asked.append(len(trial.model.layers))
            if len(trial.model.layers) < 3:
                raise IndexError("where is layer 2?")
            return real(trial, first)

        monkeypatch.setattr(tree_probe, "_compare", compare)
        assert why_not_tree(tiny_model(num_hidden_layers=3)) is None
        assert asked == [2, 3]


def test_tokens_at_which_two_experts_score_alike_do_not_decide(monkeypatch):
    answers = iter(["two experts score alike", None])
    monkeypatch.setattr(tree_probe, "_compare", lambda trial, first: next(answers))
    assert why_not_tree(tiny_model()) is None
    monkeypatch.setattr(tree_probe, "_compare", lambda trial, first: f"wrong at {first}")
    assert why_not_tree(tiny_model()) == "wrong at 13"


def test_half_precision_is_judged_in_float32():
    model = tiny_model().to(torch.bfloat16)
    assert why_not_tree(model) is None
    assert model.lm_head.weight.dtype == torch.bfloat16
