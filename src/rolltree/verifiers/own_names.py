"""Names that rolltree's environments have and those of verifiers 0.1.8 do not.

An environment written for verifiers may use them itself: `self.num_examples = 100`, or a method
`_score`. Then rolltree's code sees rolltree's value, and all other code sees the author's.
"""

from __future__ import annotations

import sys
from typing import Any

_THEIRS = """
dataset eval_dataset system_prompt few_shot parser rubric sampling_args message_type oai_tools
max_workers env_id env_args max_seq_len logger rollouts_per_example format_dataset get_dataset
get_eval_dataset get_model_response init_state setup_state rollout is_completed run_rollout
run_group generate generate_sync get_eval_inputs evaluate evaluate_sync set_max_seq_len
make_dataset max_turns prompt_too_long max_turns_reached env_response get_prompt_messages
add_model_response tools tool_map error_formatter add_tool remove_tool no_tools_called
call_tool skipped_args update_tool_args sandbox_client sandbox_request active_sandboxes
with_retry bash timeout_per_command_seconds post_rollout destroy_sandbox bulk_delete_sandboxes
teardown_sandboxes python cleanup_python_env game ta_env num_train_examples num_eval_examples
seed feedback_fn cleanup_ta_env game_completed ta_to_hf gym rg_dataset build_rg_dataset
rg_to_hf envs env_names env_map get_env_for_task _stop_conditions _cleanup_handlers
_teardown_handlers _ensure_example_id _ensure_prompt _ensure_task _cleanup _teardown
_render_stop _render_timing _render_completion _prepare_rollout_results _logger
"""
THEIRS = frozenset(_THEIRS.split())
"""Attributes of verifiers 0.1.8's environments, which authors set or override on purpose."""


_UNSET: Any = object()
_STORE = "__author_names__"


class OwnNames:
    """A base class that keeps an author's names and rolltree's apart."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if _is_ours(cls.__module__):
            return
        # Only names that rolltree uses and verifiers does not: verifiers' names are overridden on
        # purpose.
        for name in [name for name in vars(cls) if _is_reserved(cls, name)]:
            setattr(cls, name, _Shared(cls, name, vars(cls)[name]))

    def __setattr__(self, name: str, value: Any) -> None:
        # It depends on which code assigns, and only the caller's frame shows that.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _is_ours(caller) and _is_reserved(type(self), name):
            set_for_author(self, name, value)
        else:
            super().__setattr__(name, value)


def set_for_author(env: OwnNames, name: str, value: Any) -> None:
    """Set an attribute as the environment's own code would."""
    if _is_reserved(type(env), name):
        # A descriptor only works on the class, so the first assignment puts one there.
        if not any(isinstance(vars(base).get(name), _Shared) for base in type(env).__mro__):
            setattr(type(env), name, _Shared(type(env), name))
        _stored(env)[name] = value
    else:
        setattr(env, name, value)


class _Shared:
    """A name that rolltree and the author both use: each caller gets its own value."""

    def __init__(self, owner: type, name: str, theirs: Any = _UNSET) -> None:
        self.owner, self.name, self.theirs = owner, name, theirs

    def __get__(self, env: Any, cls: type | None = None) -> Any:
        # Read by the author: the author's value. Read by rolltree: rolltree's own.
        if not _is_ours(sys._getframe(1).f_globals.get("__name__", "")):
            if env is not None and self.name in _stored(env):
                return _stored(env)[self.name]
            if self.theirs is not _UNSET:
                bind = getattr(type(self.theirs), "__get__", None)
                return self.theirs if bind is None else bind(self.theirs, env, cls)
        if env is not None and self.name in vars(env):
            return vars(env)[self.name]
        # Skips the author's class, to find the value that rolltree inherits.
        return getattr(super(self.owner, cls if env is None else env), self.name)

    def __set__(self, env: Any, value: Any) -> None:
        vars(env)[self.name] = value

    def __delete__(self, env: Any) -> None:
        store = _stored(env) if self.name in _stored(env) else vars(env)
        store.pop(self.name, None)


def _stored(env: Any) -> dict[str, Any]:
    store: dict[str, Any] = vars(env).setdefault(_STORE, {})
    return store


def _is_ours(module: str) -> bool:
    return module == "rolltree" or module.startswith("rolltree.")


def _is_reserved(cls: type, name: str) -> bool:
    if name in THEIRS or name.startswith("__"):
        return False
    return any(name in vars(base) and _is_ours(base.__module__) for base in cls.__mro__)
