"""The tests of `make test-gpu` with a CPU in the GPU's place: what they check is checked here."""

import gpu_bodies as bodies
import need_cuda
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = [  # of torch's own compiler, about its own inputs
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@pytest.mark.parametrize(
    ("name", "softcap", "sinks"),
    [("full", None, False), ("window", 2.0, True), ("chunk", None, True)],
)
def test_flex_attention_and_its_gradient(name, softcap, sinks):
    pattern = bodies.PATTERNS[name]
    bodies.attention_and_its_gradient("cpu", pattern, softcap=softcap, sinks=sinks)


def test_flex_attention_in_bfloat16():
    pattern = bodies.PATTERNS["window"]
    bodies.attention_and_its_gradient("cpu", pattern, sinks=True, dtype=torch.bfloat16)


def test_a_mask_without_its_window_is_noticed(monkeypatch):
    right = bodies.tree_layout

    def forgetful(forest, *where, flex):
        layout = right(forest, *where, flex=flex)
        if flex:
            layout._made["flex_mask", bodies.PATTERNS["window"]] = layout.flex_mask()
        return layout

    monkeypatch.setattr(bodies, "tree_layout", forgetful)
    with pytest.raises(AssertionError):
        bodies.attention_and_its_gradient("cpu", bodies.PATTERNS["window"])


@pytest.mark.parametrize("kind", ["qwen3", "windowed"])
def test_the_gradient_of_a_model_by_flex_attention(kind):
    bodies.gradient_of_a_model("cpu", kind)


def test_training_in_bfloat16():
    bodies.bf16_beside_float32("cpu")


def test_a_module_sharded_over_one_rank():
    bodies.sharded_on_one_rank("cpu")


def test_the_engine_beside_the_model():
    bodies.engine_beside_the_model("cpu")


def test_new_lengths_do_not_compile_forever():
    """Traced as for a GPU, forward and backward; only the code that runs is not a kernel."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    bodies.captures("cpu", counter, ((150, 40), (160, 44), (200, 50)))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, then in [(None, "built without CUDA"), ("13.0", "sees no CUDA device")]:
        monkeypatch.setattr(torch.version, "cuda", built)
        said = need_cuda.missing("test-gpu")
        assert said is not None
        assert said.startswith("make test-gpu needs an NVIDIA GPU")
        assert then in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert need_cuda.missing("test-gpu") is None
