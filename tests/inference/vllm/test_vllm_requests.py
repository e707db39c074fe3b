"""What vLLM is asked for, and what is refused because it would not obey."""

import numpy as np
import pytest

from rolltree.inference.engine import check_extra, check_sampling, extra_of
from rolltree.scale.vllm.engine import VllmEngine, VllmRequest, vllm_fields
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import FinishReason, SamplingParams


def fields(sampling, **settings):
    extra = extra_of(sampling)
    check_sampling(sampling)
    check_extra(extra, VllmEngine.extra_settings, VllmEngine.label)
    return vllm_fields(sampling, extra, eos_token_ids=(2,), max_tokens=8, seed=3)


def test_every_field_is_explicit():
    asked = fields(
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            max_tokens=8,
            stop=("\n",),
            stop_token_ids=(7,),
            seed=3,
        )
    )
    assert asked == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "max_tokens": 8,
        "stop": ["\n"],
        "stop_token_ids": [7, 2],
        "logprobs": 0,
        "skip_special_tokens": False,
    }


def test_large_seeds_are_those_that_vllm_takes():
    asked = vllm_fields(SamplingParams(), {}, eos_token_ids=(2,), max_tokens=4, seed=2**63 + 5)
    assert (asked["seed"], asked["stop_token_ids"]) == (5, [2])


def test_further_settings_pass_also_from_extra_body():
    extra = {"min_p": 0.1, "extra_body": {"presence_penalty": 0.5}, "logprobs": True}
    asked = fields(SamplingParams(extra=extra))
    assert (asked["min_p"], asked["presence_penalty"], asked["logprobs"]) == (0.1, 0.5, 0)


def test_ignore_eos_leaves_only_the_callers_own_ends():
    asked = fields(SamplingParams(stop_token_ids=(9,), extra={"ignore_eos": True}))
    assert asked["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(temperature=-1.0), "temperature = -1.0"),
        (SamplingParams(temperature=float("nan")), "temperature = nan"),
        (SamplingParams(temperature=0.001), "vLLM samples with 0.01 instead"),
        (SamplingParams(top_p=0.0), "top_p = 0.0"),
        (SamplingParams(top_k=-2), "top_k = -2"),
        (SamplingParams(max_tokens=0), "max_tokens = 0"),
        (SamplingParams(extra={"stream": True}), "stream = True"),
        (SamplingParams(extra={"extra_body": {"min_pp": 0.1}}), "did you mean 'min_p'"),
        (SamplingParams(extra={"top_logprobs": 5}), "top_logprobs = 5"),
    ],
)
def test_what_vllm_would_not_obey_is_refused(sampling, words):
    with pytest.raises(UnsupportedSetting) as error:
        fields(sampling)
    assert words.lower() in str(error.value).lower()


def pending(**settings):
    found = VllmRequest(np.array([1, 2], np.int32), SamplingParams(**settings), 0, 9)
    found.ids, found.logprobs, found.versions = [5, 2], [-0.5, 1e-7], [3, 4]
    return found


def test_an_output_has_one_entry_per_token_and_no_logprob_above_zero():
    output = pending().output("stop", 2)
    assert output.completion_ids.tolist() == [5, 2]
    assert output.logprobs.tolist() == [-0.5, 0.0]
    assert output.versions.tolist() == [3, 4]
    assert output.logprobs.dtype == np.float32
    assert output.completion_ids.dtype == output.versions.dtype == np.int32
    assert (output.finish_reason, output.stop) == (FinishReason.STOP, None)


def test_only_the_callers_own_stops_are_named():
    assert pending(stop_token_ids=(2,)).output("stop", 2).stop == 2
    assert pending(stop=("x",)).output("stop", "x").stop == "x"
    assert pending(stop_token_ids=(9,)).output("stop", 2).stop is None
    assert pending().output("length", None).finish_reason == FinishReason.LENGTH


def test_an_unknown_end_is_not_passed_off_as_a_known_one():
    with pytest.raises(ValueError, match="somehow"):
        pending().output("somehow", None)
    assert pending().output("repetition", None).finish_reason == FinishReason.LENGTH
