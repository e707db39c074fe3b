"""LoRA adapters through peft, and merging them into weights.

y = W x + (alpha / r) B A x, and only A and B are trained (Hu et al. 2021, arXiv:2106.09685,
equation 3). There is no dropout, so that the trainer computes what the engine sampled from, and
quantised base weights are not supported.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from rolltree.training.models.plain_weights import (
    ADAPTER,
    ADAPTER_FILE,
    copy_weights,
    is_adapted,
    own_tensors,
)
from rolltree.training.models.shards import whole
from rolltree.training.sections import ModelSection
from rolltree.values.errors import (
    ConfigError,
    as_sentence,
    did_you_mean,
    import_extra,
)

if TYPE_CHECKING:
    pass


_PREFIX = "base_model.model."
_BELOW = ".base_layer"


def add_adapter(model: Any, section: ModelSection, seed: int) -> None:
    """Put adapters on the weights that `section` names; nothing else trains from then on.

    They go on linear layers and on experts that share one tensor; layers that share a weight share
    its adapter. The same seed gives the same adapters. B starts at 0, so the outputs of the model
    do not change.

    Raises:
        ConfigError: peft is missing, or a target cannot have an adapter in this model.
    """
    peft = import_extra("peft", "model.lora_rank", "rolltree[train]")
    linear, experts = _linear_layers(model), _expert_weights(model)
    known = {*linear.values(), *experts.values()}
    for target in section.lora_targets:
        if target not in known:
            raise ConfigError(
                f"model.lora_targets has {target!r}, which is not a linear layer or a weight of "
                f"experts of {type(model).__name__}.{did_you_mean(target, known)}"
            )
    wanted = set(section.lora_targets) or known
    layers = [name for name, short in linear.items() if short in wanted]
    if not section.lora_targets:
        # By default, adapt the layers that work. Targets that the user named must (`check_copy`).
        layers = _usable_layers(model, layers)
    weights = [name for name, short in experts.items() if short in wanted]
    if not layers and not weights:
        raise ConfigError(
            f"model.lora_rank is set, and {type(model).__name__} has no linear layer that could "
            "have an adapter. Leave model.lora_rank out to train its weights."
        )
    config = peft.LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha or 2 * section.lora_rank,
        target_modules=layers,
        target_parameters=weights,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        # GPT-2 stores its linear weights transposed; peft takes one setting for all layers.
        fan_in_fan_out=any(_is_conv1d(model.get_submodule(name)) for name in linear),
        base_model_name_or_path=model.name_or_path,
    )
    # peft renames targets of models that it knows (shared experts would lose theirs to the others).
    # It knows a model by its config, which this holder does not have.
    holder = nn.Module()
    holder.model = model
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of targets that a model lacks
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, holder, ADAPTER)
        except Exception as error:  # it follows transformers' layers, which change between releases
            raise ConfigError(
                f"peft {peft.__version__} with transformers {transformers.__version__} could not "
                f"put adapters on {type(model).__name__}: {as_sentence(error)} Install "
                "versions that are tested together (`rolltree doctor` names them), name other "
                "layers in model.lora_targets, or leave model.lora_rank out."
            ) from error
    # peft froze these parameters; `take_off` lets them train again.
    model._rolltree_trained = trained
    # transformers sets both when it adds an adapter itself, and reads them when it saves.
    model._hf_peft_config_loaded, model.peft_config = True, {ADAPTER: config}
    # Layers that share a weight share an adapter: two could not both be merged into it.
    first: dict[int, Any] = {}
    for module in model.modules():
        if ADAPTER in getattr(module, "lora_A", {}):
            other = first.setdefault(id(_weight_below(module)), module)
            module.lora_A, module.lora_B = other.lora_A, other.lora_B
    # peft adds its modules in training mode.
    model.eval()
    adapted_modules(model)


def _linear_layers(model: Any) -> dict[str, str]:
    """Return the layers that can have adapters by full name, with their short names.

    A linear layer that computes something else (Llama 4's router) has none.
    """
    return {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if (_is_linear(module) or _is_conv1d(module))
        and module is not model.get_output_embeddings()
    }


@torch.no_grad()
def _is_linear(module: Any) -> bool:
    """Whether a module computes what `nn.Linear` does, as Falcon's own linear class does."""
    # A subclass with its own `forward` may compute anything, so compare it with `nn.Linear`.
    if type(module).forward is nn.Linear.forward or not isinstance(module, nn.Linear):
        return isinstance(module, nn.Linear)
    try:
        given = torch.linspace(-1, 1, module.in_features).to(module.weight)[None]
        wanted = functional.linear(given, module.weight, module.bias)
        computed = module(given)
    except Exception:  # noqa: BLE001  (a module is a program, and this one is unknown)
        return False
    return isinstance(computed, Tensor) and torch.allclose(computed, wanted, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def _usable_layers(model: Any, layers: list[str]) -> list[str]:
    """Return the layers that the model runs and whose weights it does not use elsewhere.

    Other layers get an adapter only if they are named: of Mamba's `dt_proj` only the weight is
    read, and a weight may be an embedding too. A few tokens show which layers run; layers whose
    names differ only in numbers are treated alike, because a token does not reach every expert.
    """
    kinds = {name: re.sub(r"\d+", "*", name) for name in layers}
    holders: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(tensor), []).append(name.removesuffix(".weight"))
    ran: set[str] = set()
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, kind=kind: ran.add(kind))
        for name, kind in kinds.items()
    ]
    try:
        _probe(model)
    finally:
        for handle in handles:
            handle.remove()
    return [
        name
        for name, kind in kinds.items()
        # A weight that another module uses too, such as a tied embedding, would change there as
        # well.
        if kind in ran and set(holders[id(model.get_submodule(name).weight)]) <= kinds.keys()
    ]


def _probe(model: Any) -> Tensor:
    """Return the logits `[8, 4, _V]` of a few tokens."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(embedding), (8, 4), generator=generator).to(embedding.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _expert_weights(model: Any) -> dict[str, str]:
    """Return the tensors `[num_experts, ...]` of experts by full name, with their short names."""
    weights = {}
    for path, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        for name, tensor in module.named_parameters(recurse=False):
            if num_experts and num_experts > 1 and tensor.shape[:-2] == (num_experts,):
                own = path.rpartition(".")[2] if name == "weight" else name
                weights[f"{path}.{name}"] = own
    return weights


def _is_conv1d(module: Any) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight is the transpose of `nn.Linear`'s."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), False),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "layer_replication"), None),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config"), None),
    **dict.fromkeys(("monteclora_config", "use_bdlora", "velora_config"), None),
    "bias": "none",
}
"""Settings of peft that make an adapter more than two matrices, with the values that do not."""


def unwrapped(model: Any) -> Any:
    """Return the causal LM inside a `PeftModel`, with its adapter; other models as they are.

    Raises:
        ConfigError: it has anything but a single LoRA adapter of weights, called `default`.
    """
    is_wrapped = hasattr(model, "get_base_model")
    if not is_wrapped and not is_adapted(model):
        return model
    configs = dict(model.peft_config)
    config = configs.get(ADAPTER)
    base = model.get_base_model() if is_wrapped else model
    wrong = [
        *(["several adapters"] if len(configs) > 1 else []),
        *([f"no adapter called {ADAPTER!r}"] if config is None else []),
        *([f"an adapter of type {config.peft_type}"] if config and not _is_lora(config) else []),
        *(
            f"{name} = {getattr(config, name)!r}"
            for name, plain in _PLAIN.items()
            if config and (getattr(config, name, plain) or plain) != plain
        ),
        *(
            ["an adapter of the embedding"]
            if any("lora_emb" in n for n in base.state_dict())
            else []
        ),
    ]
    # Whatever else peft may train for an adapter is none of the two matrices that are merged.
    own = tuple(f"lora_{side}.{ADAPTER}.weight" for side in "AB")
    others = [n for n, _ in base.named_parameters() if f".{ADAPTER}" in n and not n.endswith(own)]
    if others and not wrong:
        wrong = [f"the parameter {others[0]}"]
    if wrong:
        raise ConfigError(
            f"the adapted model that was given has {', '.join(wrong)}; what can be trained is one "
            f"LoRA adapter of linear layers or experts, called {ADAPTER!r}. Merge it and pass the "
            "model (model.merge_and_unload()), with model.lora_rank for a new adapter."
        )
    base._hf_peft_config_loaded, base.peft_config = True, {ADAPTER: config}
    return base


def _is_lora(config: Any) -> bool:
    return str(getattr(config.peft_type, "value", config.peft_type)) == "LORA"


def take_off(model: Any) -> bool:
    """Undo `add_adapter`, and return whether it was called; the weights below do not change."""
    trained = getattr(model, "_rolltree_trained", None)
    if trained is None:
        return False
    remove_adapters(model)
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    del model._rolltree_trained
    return True


def remove_adapters(model: Any) -> None:
    """Put the layers back that adapters wrap; what the adapters learned is lost."""
    # Wrappers of several tensors of one module are nested and go together, so search again each
    # time.
    while wrapped := next((n for n, m in model.named_modules() if _wraps(m)), None):
        model.set_submodule(wrapped, model.get_submodule(wrapped).get_base_layer())
    model._hf_peft_config_loaded = False
    del model.peft_config


def _wraps(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def accept_adapter(model: Any) -> tuple[int, float]:
    """Let the adapter that a model came with be trained, and return its rank and alpha."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.eval()
    adapted_modules(model)
    config = model.peft_config[ADAPTER]
    return int(config.r), float(config.lora_alpha)


def changes_nothing(model: Any) -> bool:
    """Whether the adapters of a model are as `add_adapter` makes them: B is 0."""
    modules = adapted_modules(model).values()
    return not any(module.lora_B[ADAPTER].weight.any() for module in modules)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Let `model` compute what it did before `add_adapter` while the context is open.

    Only the scale of the adapters is set to 0, so shards and what autograd has recorded do not
    change.
    """
    # One dict per layer, `{adapter: scale}`, which is changed in place.
    scales = [module.scaling for module in model.modules() if hasattr(module, "base_layer")]
    before = [scale[ADAPTER] for scale in scales]
    try:
        for scale in scales:
            scale[ADAPTER] = 0.0
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale[ADAPTER] = value


def write_adapter(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write adapters, named as in `model`, as a folder that peft reads.

    transformers writes the same files, but some of its releases refuse every release of peft.
    """
    named = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files.

    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


@torch.no_grad()
def merged_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what `plain_tensors` yields of a model with adapters, added to the weights below."""
    adapted = adapted_modules(model)
    for name, tensor in own_tensors(model).items():
        if ".lora_" in name:
            continue
        value = whole(tensor)
        if name in adapted:
            with _gathered(adapted[name]) as module:
                value = value + module.get_delta_weight(ADAPTER)
        yield name.replace(_BELOW, ""), value


def _weight_below(module: Any) -> Tensor:
    """Return the weight that one of peft's modules adapts."""
    name = getattr(module, "parameter_name", "weight")
    tensor: Tensor = getattr(module.get_base_layer(), name)
    return tensor


def adapted_modules(model: Any) -> dict[str, Any]:
    """Return peft's module for each adapted parameter, by the parameter's name.

    Raises:
        ConfigError: the adapters could not be merged into the weights below.
    """
    names: dict[int, list[str]] = {}
    adapters: dict[int, list[Any]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    modules: dict[str, Any] = {}
    for path, module in model.named_modules():
        if ADAPTER not in getattr(module, "lora_A", {}):
            continue
        tensor = _weight_below(module)
        adapters.setdefault(id(tensor), []).append(module.lora_A)
        # Compare sorted sizes, because some weights are stored transposed.
        shape = (*tensor.shape[:-2], *sorted(tensor.shape[-2:]))
        sides = sorted([module.lora_A[ADAPTER].in_features, module.lora_B[ADAPTER].out_features])
        if shape[-2:] != tuple(sides):
            raise ConfigError(f"peft made an adapter for {path} that does not fit {shape}.")
        # `named_parameters` lists a tied weight once, under its first name.
        modules.setdefault(names[id(tensor)][0], module)
    for tensor_id, made in adapters.items():
        own = [name.replace(_BELOW, "") for name in names[tensor_id]]
        if len(made) != len(own) or any(adapter is not made[0] for adapter in made):
            raise ConfigError(
                f"the weight {own[0]} is used in several places "
                f"({', '.join(own[1:]) or 'with two adapters'}), so an adapter of one of them "
                "cannot be added to it. Leave it out of model.lora_targets, or name all of them."
            )
    return modules


@contextmanager
def _gathered(module: Any) -> Iterator[Any]:
    """Make the two matrices of an adapter whole, not shards, while the context is open."""
    parts = (module.lora_A[ADAPTER], module.lora_B[ADAPTER])
    # peft multiplies A and B as plain matrices, which shards are not.
    shards = [part.weight for part in parts]
    try:
        for part in parts:
            part.weight = nn.Parameter(whole(part.weight), requires_grad=False)
        yield module
    finally:
        for part, shard in zip(parts, shards, strict=True):
            part.weight = shard


@torch.no_grad()
def check_copy(model: Any, served: Any) -> None:
    """Refuse adapters that do not change the output of `model` as their merged weights would.

    Some models read a weight without calling its module: an adapter there has no effect in the
    trainer, but would have one after merging. The two are compared with adapters moved away from
    0; then everything is restored. Call it before sharding, on the process that has the copy.

    Raises:
        ConfigError: naming the targets that do not work.
    """
    modules = adapted_modules(model)
    bad: list[str] = []
    if _copy_is_off(model, served, list(modules.values())):
        short = {
            name: name.replace(_BELOW, "").removesuffix(".weight").rpartition(".")[2]
            for name in modules
        }
        bad = [
            target
            for target in sorted(set(short.values()))
            if _copy_is_off(model, served, [m for n, m in modules.items() if short[n] == target])
        ] or ["all of them together"]
    # The comparison left the copy with moved adapters merged in.
    copy_weights(model, served)
    if bad:
        raise ConfigError(
            f"{type(model).__name__} does not compute with the adapters of {', '.join(bad)} "
            "as with a change of the weights, so what is served would not be what is trained. Name "
            "other layers in model.lora_targets, or train without adapters."
        )


# How far the check moves an adapter, as a share of the norm of the weight below it.
_MOVE = 0.1
# Largest error of the copy, as a share of what that move changes in the logits.
_EXACT = 1e-3


def _copy_is_off(model: Any, served: Any, modules: list[Any]) -> bool:
    """Return whether the copy differs from the model if some adapters are moved away from 0.

    It takes medians over tokens, because rounding may route a token to different experts.
    """
    generator = torch.Generator().manual_seed(0)
    before = [module.lora_B[ADAPTER].weight.clone() for module in modules]
    plain = _probe(model)
    for module in modules:
        up, weight = module.lora_B[ADAPTER].weight, _weight_below(module)
        up.copy_(torch.randn(up.shape, generator=generator))
        # Scale by the norms, so that the move shows for any rank and alpha.
        up.mul_(_MOVE * weight.norm() / module.get_delta_weight(ADAPTER).norm())
    try:
        moved = _probe(model)
        copy_weights(model, served)
        copied = _probe(served)
    finally:
        for module, weight in zip(modules, before, strict=True):
            module.lora_B[ADAPTER].weight.copy_(weight)
    error, effect = ((x - moved).abs().amax(-1).median() for x in (copied, plain))
    # `not <=` instead of `>`, so that NaN counts as off.
    return not bool(error <= _EXACT * effect + 1e-6 * moved.abs().max())


def skeleton(model: Any) -> Any:
    """Return the model without adapters and without weights, for its configuration."""
    with torch.device("meta"):  # its own class: transformers finds none for some configurations
        plain = type(model)._from_config(model.config)
    plain.generation_config = model.generation_config
    if hasattr(model, "_weight_conversions"):  # checkpoint names of fused weights
        plain._weight_conversions = model._weight_conversions
    return plain


def peft_reads(model: Any, adapter: Mapping[str, Tensor], folder: Path) -> bool:
    """Return whether peft reads the same adapters back from a folder.

    In mixture-of-experts models whose layers peft renames (those of transformers 4) it leaves out
    shared experts and dense layers, and it refuses output projections of Mamba.
    """
    from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):  # all but the adapters
                read = PeftModel(skeleton(model), LoraConfig.from_pretrained(str(folder)))
            for name, module in read.named_modules():
                if name.endswith(f".{ADAPTER}") and ".lora_" in name:
                    for parameter in module.to_empty(device="cpu").parameters():
                        # What peft leaves out stays NaN, which equals nothing.
                        parameter.data.fill_(math.nan)
            set_peft_model_state_dict(read, load_peft_weights(str(folder), device="cpu"))
        except Exception:  # noqa: BLE001  (whatever it is, it would fail elsewhere too)
            return False
    made = dict(read.get_base_model().named_parameters())
    return all(name in made and torch.equal(made[name], value) for name, value in adapter.items())
