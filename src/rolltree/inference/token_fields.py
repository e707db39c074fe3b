"""The fields that ask a server for the ids and logprobs of tokens.

The first request shows whether a server understands them: `TokenFields` remembers this, and logs
one warning if the server gives no ids.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from rolltree.inference.request_fields import check_choice, samples_the_model
from rolltree.values.errors import TokenError, UnsupportedSetting
from rolltree.values.types import IntArray, MessageType, SamplingParams

logger = logging.getLogger("rolltree.inference")

TokenIds = Literal["auto", "vllm", "off"]
"""Whether to request token ids: if the server gives them, always, or never."""
LogprobsMode = Literal["raw", "processed"]
"""Whether a server's logprobs are the model's own or those of the distribution sampled from."""


class TokenFields:
    """The fields that ask one server for ids and logprobs, sent unless it rejects them.

    `standard` are OpenAI's own (`logprobs`), `extension` are vLLM's. `vocab_size` is the
    size of the model's vocabulary, if it is known.
    """

    def __init__(
        self,
        mode: TokenIds,
        logprobs_mode: LogprobsMode,
        where: str,
        vocab_size: int | None = None,
    ) -> None:
        check_choice("token_ids", mode, ("auto", "vllm", "off"))
        check_choice("logprobs_mode", logprobs_mode, ("raw", "processed"))
        self.mode = mode
        self.logprobs_mode = logprobs_mode
        self.vocab_size = vocab_size
        self._where = where
        self._refused = False
        self._proven = False
        self._logged_topics: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether to request ids."""
        return self.mode != "off" and not self._refused

    @property
    def may_be_refused(self) -> bool:
        """Whether a rejected request may have been rejected because of these fields."""
        return self.mode == "auto" and self.wanted and not self._proven

    def standard(self, message_type: MessageType) -> dict[str, Any]:
        """Return OpenAI's fields for the logprobs of the sampled tokens."""
        if not self.wanted:
            return {}
        # Chat has a switch, text a number of alternatives.
        return {"logprobs": True} if message_type == "chat" else {"logprobs": 1}

    def extension(self) -> dict[str, Any]:
        """Return vLLM's fields: ids, and no sampling defaults from the model folder."""
        if not self.wanted:
            return {}
        return {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    def refuse(self, why: str) -> None:
        """Note that the server rejects these fields, which are not sent any more.

        Raises:
            UnsupportedSetting: as `lack` says.
        """
        self.lack(why)
        # If the server has given ids before, they are still requested.
        self._refused = not self._proven

    def lack(self, why: str) -> None:
        """Note that an answer has no ids; the next one may have them.

        Raises:
            UnsupportedSetting: the mode is "vllm", which requires ids.
        """
        if self.mode == "vllm":
            error = UnsupportedSetting(
                f"{self._where} gives no token ids ({why}), but token_ids = 'vllm' insists on them "
                "because calls without ids cannot be trained. Serve the model with vLLM >= 0.10.2, "
                "or set token_ids = 'auto' to evaluate only."
            )
            error.kind = "machine"  # the server's, whatever the model wrote
            raise error
        self._say(
            "ids",
            f"{self._where} gives no token ids ({why}): calls can be evaluated but cannot be "
            "trained. vLLM and rolltree's own engine give ids.",
        )

    def prove(self, *ids: IntArray) -> None:
        """Note that the server gave `ids`, int32 `[_T]` each.

        Raises:
            TokenError: an id is outside the model's vocabulary.
        """
        size = self.vocab_size
        high = 0 if size is None else max(int(array.max(initial=0)) for array in ids)
        if size is not None and high >= size:
            raise TokenError(
                f"{self._where} reports the token id {high}, but the model has "
                f"{size} ids, so it cannot be trained. Does the server have a different "
                "model?"
            )
        self._proven = True

    def usable_logprobs(self, sampling: SamplingParams) -> bool:
        """Whether the server's logprobs are those of the distribution sampled from."""
        if self.logprobs_mode == "processed" or samples_the_model(sampling):
            return True
        self._say(
            "raw",
            f"{self._where} gives raw logprobs, but temperature, top_p or the like reshape what is "
            "sampled, so its logprobs are dropped. Start vLLM with --logprobs-mode "
            "processed_logprobs and set logprobs_mode = 'processed' to train on such calls.",
        )
        return False

    def _say(self, topic: str, text: str) -> None:
        # Once, not for every call.
        if topic not in self._logged_topics:
            self._logged_topics.add(topic)
            logger.warning(text)
