"""Values of every field of the official packages' requests: the API's default, and others."""

import anthropic.types.beta.message_create_params as beta_params
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

USER = [{"role": "user", "content": "7 + 5 ="}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
FREE = {"type": "custom", "custom": {"name": "run", "description": "Run."}}
NAMED = {"type": "function", "function": {"name": "add"}}
CACHED = {"type": "ephemeral"}
BIAS = {"65": 5}

CHAT = {
    "messages": [USER, [{"role": "developer", "content": "Add."}, *USER]],
    "model": ["m", "gpt-6"],
    "audio": [None, {"voice": "alloy", "format": "wav"}],
    "frequency_penalty": [0, 0.5],
    "function_call": ["auto", "none", {"name": "add"}],
    "functions": [[], [FUNCTION]],
    "logit_bias": [{}, BIAS],
    "logprobs": [False, True],
    "max_completion_tokens": [None, 3],
    "max_tokens": [None, 3],
    "metadata": [{}, {"a": "b"}],
    "modalities": [["text"], ["text", "audio"]],
    "moderation": [None, {"model": "omni-moderation-latest"}],
    "n": [1, 2],
    "parallel_tool_calls": [True, False],
    "prediction": [None, {"type": "content", "content": "12"}],
    "presence_penalty": [0, 0.5],
    "prompt_cache_key": [None, "k"],
    "prompt_cache_options": [{}, {"mode": "explicit", "ttl": "30m"}],
    "prompt_cache_retention": [None, "24h", "in_memory"],
    "reasoning_effort": ["medium", "none", "minimal", "low", "high", "xhigh", "max"],
    "response_format": [{"type": "text"}, {"type": "json_object"}, FORMAT],
    "safety_identifier": [None, "me"],
    "seed": [None, 7],
    "service_tier": ["auto", "default", "flex", "priority"],
    "stop": [None, "!", ["!", "?"]],
    "store": [False, True],
    "stream": [False, True],
    "stream_options": [None, {"include_usage": True}, {"include_obfuscation": False}],
    "temperature": [1, 0.5, 0],
    "tool_choice": ["auto", "none", "required", NAMED],
    "tools": [
        [],
        [CHAT_TOOL],
        [FREE],
        [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    ],
    "top_logprobs": [0, 2],
    "top_p": [1, 0.5],
    "user": [None, "me"],
    "verbosity": ["medium", "low", "high"],
    "web_search_options": [None, {}, {"search_context_size": "low"}],
}
COMPLETIONS = {
    "model": ["m", "gpt-3.5-turbo-instruct"],
    "prompt": ["7 + 5 =", ["7", "8"], [55, 56], [[55], [56]]],
    "best_of": [1, 2],
    "echo": [False, True],
    "frequency_penalty": [0, 0.5],
    "logit_bias": [{}, BIAS],
    "logprobs": [None, 0, 1, 3],
    "max_tokens": [16, 3],
    "n": [1, 2],
    "presence_penalty": [0, 0.5],
    "seed": [None, 7],
    "stop": [None, "!", ["!", "?"]],
    "stream": [False, True],
    "stream_options": [None, {"include_usage": True}],
    "suffix": [None, " is the sum."],
    "temperature": [1, 0.5, 0],
    "top_p": [1, 0.5],
    "user": [None, "me"],
}
RESPONSE_TOOL = {"type": "function", **FUNCTION, "strict": True}
RESPONSES = {
    "access_programs": [{}, {"a": "b"}],
    "background": [False, True],
    "background_options": [{}, {"completion_window": "soonest"}, {"completion_window": "24h"}],
    "context_management": [[], [{"type": "compaction", "compact_threshold": 1000}]],
    "conversation": [None, "conv_1", {"id": "conv_1"}],
    "image": [{}, {"detail": "high"}],
    "include": [[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]],
    "input": ["7 + 5 =", [{"role": "user", "content": "8"}]],
    "instructions": [None, "Add."],
    "max_output_tokens": [None, 20],
    "max_tool_calls": [None, 3],
    "metadata": [{}, {"a": "b"}],
    "model": ["m", "gpt-6"],
    "moderation": [None, {"model": "omni-moderation-latest"}],
    "parallel_tool_calls": [True, False],
    "previous_response_id": [None, "resp_0"],
    "prompt": [None, {"id": "pmpt_1"}],
    "prompt_cache_key": [None, "k"],
    "prompt_cache_options": [{}, {"mode": "explicit", "ttl": "30m"}],
    "prompt_cache_retention": [None, "24h"],
    "reasoning": [
        {},
        *({"effort": each} for each in ("medium", "none", "minimal", "low", "high", "xhigh")),
        *({"summary": each} for each in ("auto", "concise", "detailed")),
        {"generate_summary": "auto"},
        {"context": "auto"},
        {"context": "all_turns"},
    ],
    "safety_identifier": [None, "me"],
    "service_tier": ["auto", "default", "flex", "priority"],
    "store": [True, False],
    "stream": [False, True],
    "stream_options": [None, {"include_obfuscation": True}],
    "temperature": [1, 0.5, 0],
    "text": [
        {},
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        *({"verbosity": each} for each in ("medium", "low", "high")),
    ],
    "tool_choice": ["auto", "none", "required", {"type": "function", "name": "add"}],
    "tools": [[], [RESPONSE_TOOL], [{"type": "custom", "name": "run"}], [{"type": "web_search"}]],
    "top_logprobs": [0, 2],
    "top_p": [1, 0.5],
    "truncation": ["disabled", "auto"],
    "user": [None, "me"],
}
ANTHROPIC_TOOL = {"name": "add", "input_schema": SCHEMA}
MESSAGES = {
    "max_tokens": [8, 3],
    "messages": [USER, [*USER, {"role": "assistant", "content": "It is"}]],
    "model": ["m", "claude-opus-5"],
    "billing_policy": [None, {"type": "standard"}],
    "cache_control": [None, CACHED],
    "compaction": [None, {"type": "auto"}],
    "container": [None, "c_1"],
    "context_management": [None, {"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}]}],
    "diagnostics": [None, {"previous_message_id": "msg_1"}],
    "fallback_credit_token": [None, "t"],
    "fallbacks": [None, "default", [{"model": "other"}]],
    "inference_geo": [None, "global", "us"],
    "mcp_servers": [[], [{"type": "url", "url": "https://example.com", "name": "a"}]],
    "metadata": [{}, {"user_id": "me"}],
    "output_config": [
        {},
        *({"effort": each} for each in ("high", "low", "medium", "max")),
        {"format": {"type": "json_schema", "schema": SCHEMA}},
        {"task_budget": {"type": "tokens", "total": 100}},
    ],
    "output_format": [None, {"type": "json_schema", "schema": SCHEMA}],
    "service_tier": ["auto", "standard_only"],
    "speed": ["standard", "fast"],
    "stop_sequences": [[], ["!"]],
    "stream": [False, True],
    "system": ["", "Add.", [{"type": "text", "text": "Add.", "cache_control": CACHED}]],
    "temperature": [1, 0.5, 0],
    "thinking": [
        {"type": "disabled"},
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive"},
        {"type": "between_tools"},
    ],
    "thread": [None, {"type": "create"}],
    "tool_choice": [
        {"type": "auto"},
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "none"},
        {"type": "any"},
        {"type": "tool", "name": "add"},
    ],
    "tools": [
        [],
        [ANTHROPIC_TOOL],
        [{**ANTHROPIC_TOOL, "strict": True}],
        [{"type": "bash_20250124", "name": "bash"}],
    ],
    "top_k": [None, 5],
    "top_p": [1, 0.5],
    "betas": [[], ["output-128k-2025-02-19"]],
    "user_profile_id": [None, "u"],
    "workspace_id": [None, "w"],
}

OFFICIAL = {
    "chat/completions": [
        chat_params.CompletionCreateParamsNonStreaming,
        chat_params.CompletionCreateParamsStreaming,
    ],
    "completions": [
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ],
    "responses": [
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ],
    "messages": [
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta_params.MessageCreateParamsNonStreaming,
        beta_params.MessageCreateParamsStreaming,
    ],
}
"""The types of the requests at each path."""
VALUES = {
    "chat/completions": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
"""The values of every field, the API's default first."""
BASES = {
    "chat/completions": {"model": "m", "messages": USER, "max_tokens": 4},
    "completions": {"model": "m", "prompt": "7 + 5 =", "max_tokens": 4},
    "responses": {"model": "m", "input": "7 + 5 =", "max_output_tokens": 16},
    "messages": {"model": "m", "messages": USER, "max_tokens": 4},
}
"""The request to which one field is added."""


def request_with(path, name, value):
    """Return the request that has the field; beside it stands only what it is worthless without."""
    body = {**BASES[path], name: value}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    if name == "tool_choice":
        body["tools"] = {"responses": [RESPONSE_TOOL], "messages": [ANTHROPIC_TOOL]}.get(
            path, [CHAT_TOOL]
        )
    if name == "stream_options":
        body["stream"] = True
    if name == "top_logprobs" and value:
        body["logprobs" if path != "responses" else "include"] = (
            True if path != "responses" else ["message.output_text.logprobs"]
        )
    return body
