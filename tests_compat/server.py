"""The scripted model and judge that both sides play against, over real HTTP on loopback.

An answer is a function of the request and of how often the same request has come in the same case,
so both sides get the same answers if they send the same requests. `/CASE/SCRIPT/v1` is a base URL:
the requests of each case are kept apart, and SCRIPT names who answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data import TRUTH, WORDS

from rolltree.testing.loopback import LoopbackServer, Reply, Request

Body = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """One answer: text, tool calls as (name, arguments), why it ended; or a failed request."""

    text: str | None = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    status: int = 200
    message: str = ""


class Model:
    """What the script functions see of a request: its body, its text, a number made of it."""

    def __init__(self, body: Body, count: int) -> None:
        self.body = body
        self.count = count
        self.messages: list[Body] = body.get("messages") or []
        self.is_chat = "messages" in body
        asked = json.dumps([body.get("messages"), body.get("prompt")], sort_keys=True)
        self.text = text_of(self.messages) if self.is_chat else str(body.get("prompt"))
        digest = hashlib.sha256(f"{count}{asked}".encode()).digest()
        self.number = int.from_bytes(digest[:4], "big")
        self.asked = asked
        self.turn = sum(message["role"] == "assistant" for message in self.messages)
        self.last = self.messages[-1] if self.messages else {}

    def pick(self, *options: Any) -> Any:
        """Return one of the options, by the request's number."""
        return options[self.number % len(options)]

    def truth(self) -> str:
        """Return the answer of the question in the request, "42" when it is none of ours."""
        first = next((m for m in self.messages if m["role"] == "user"), None)
        text = text_of([first]) if first else self.text
        for question, answer in TRUTH.items():
            if question in text:
                return answer
        return "42"


def text_of(messages: list[Body]) -> str:
    """Return the text of messages, one after the other."""
    parts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts.extend(part.get("text") or "" for part in content if isinstance(part, dict))
    return "\n".join(parts)


def solver(model: Model) -> Said:
    """Answer in one of several formats, two of three times right; call tools if there are any."""
    tools = model.body.get("tools") or []
    asks_by_name = "Call the following tools" in model.text
    if tools and (asks_by_name or (model.turn < 3 and model.number % 5 < 3)):
        return caller(model, asks_by_name)
    truth = model.truth()
    right = truth if model.number % 3 else truth + "1"
    form = (model.number // 3) % 9
    if form == 0:
        return Said(f"I think it is \\boxed{{{right}}}.")
    if form == 1:
        return Said(f"<think>Let me see.</think>\\boxed{{{right}}}")
    if form == 2:
        return Said(f"<reasoning>\nEasy.\n</reasoning>\n<answer>\n{right}\n</answer>")
    if form == 3:
        return Said(f"<answer>{right}</answer>")
    if form == 4:
        return Said(right, finish="length")
    if form == 5:
        return Said("")
    if form == 6:
        return Said(f"<think>Two tries</think>\n<answer>no</answer><answer> {right} </answer>")
    if form == 7:
        return Said(f"The answer: \\boxed{{no}}, or rather \\boxed{{{right}}} é ✓")
    return Said(f"<reversed_text>{right}</reversed_text> <guess>[{right}]</guess>")


def caller(model: Model, by_name: bool) -> Said:
    """Call one or two of the tools, with arguments that mostly fit their schemas."""
    tools = [tool["function"] for tool in model.body["tools"]]
    asked = [tool for tool in tools if tool["name"] in model.text] if by_name else []
    chosen = asked or [tools[model.number % len(tools)]]
    if not asked and model.number % 4 == 0:
        chosen.append(tools[(model.number + 1) % len(tools)])
    if by_name and model.number % 4 == 0:
        chosen = chosen[1:]
    calls = [(tool["name"], json.dumps(arguments(tool, model))) for tool in chosen]
    if not by_name:
        spoiled = (model.number // 7) % 8
        if spoiled == 0:
            calls[0] = ("no_such_tool", calls[0][1])
        if spoiled == 1:
            calls[0] = (calls[0][0], json.dumps({"wrong_name": 1}))
    text = None if model.number % 2 else "Let me look."
    if not calls:
        return Said("No tool.")
    return Said(text, tuple(calls), "tool_calls")


def arguments(tool: Body, model: Model) -> Body:
    """Return arguments for a tool, from its schema."""
    schema = tool.get("parameters") or {}
    given: Body = {}
    for name, shape in (schema.get("properties") or {}).items():
        options = [*shape.get("enum", ()), *shape.get("examples", ())]
        kind = shape.get("type") or next(
            (part.get("type") for part in shape.get("anyOf", ()) if part.get("type")), "string"
        )
        samples: dict[str, Any] = {
            "integer": model.number % 7,
            "number": 1.5,
            "boolean": bool(model.number % 2),
            "array": [1, 2],
            "object": {"a": 1},
            "null": None,
        }
        if options:
            given[name] = options[model.number % len(options)]
        elif name == "code":
            given[name] = model.pick("1 + 1", "print('x' * 3)", "1 / 0", "y = 3\ny * 2")
        elif name in ("page_id", "section_id"):
            given[name] = model.pick("page_1", "page_2:history", "page_2", "page_1:full", "nowhere")
        else:
            given[name] = samples.get(kind, model.pick("history", "b c", "page 2"))
    return given


def wordle(model: Model) -> Said:
    """Guess words, the secret one not before the second turn."""
    words = WORDS
    word = words[(model.number + model.turn) % len(words)]
    form = model.number % 6
    if form == 0:
        return Said(f"<guess>{word}</guess>")
    if form == 1:
        return Said("I give up")
    if form == 2:
        return Said(f"<think>hm</think><guess>[{word}]</guess> and <guess>[{words[0]}]</guess>")
    return Said(f"Let me try <guess>[{word}]</guess>")


def judge(model: Model) -> Said:
    """Grade in whatever way the prompt asks for."""
    if "<grade>" in model.text:
        return Said(f"<scratchpad>hm</scratchpad><grade>{model.pick('A', 'B-', 'C', 'f')}</grade>")
    if "NOT_ATTEMPTED" in model.text:
        return Said(model.pick("A", "B", "C"))
    if "0 to 10" in model.text:
        return Said(model.pick("7", "10", "Score: 3", "none"))
    if "between 0.0 and 1.0" in model.text:
        return Said(model.pick("0.5", "1.0"))
    return Said(model.pick("yes", "no", "Yes."))


def echo(model: Model) -> Said:
    """Repeat the last sentence in quotes of the conversation, or its last 40 characters."""
    found = re.findall(r'"([^"]{10,})"', model.text)
    return Said(found[-1][: 60 + model.number % 40] if found else model.text[-40:])


def writer(model: Model) -> Said:
    """Continue a text: one line, then another that a stop string would have cut."""
    text = f" {model.pick('and so', 'which then', 'but later')} it went on.\nMore."
    stops = model.body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.partition(stop)[0]
    return Said(text)


def overlong(model: Model) -> Said:
    """Answer short prompts; refuse one with an assistant message in it, as vLLM does."""
    if model.turn >= 1:
        return Said(
            status=400,
            message="This model's maximum context length is 64 tokens. However, you requested 100 "
            "tokens. Please reduce the length of the messages.",
        )
    return solver(model)


def flaky(model: Model) -> Said:
    """Fail for one question, answer the others."""
    failed = "What is 2 plus 5?" in model.text
    return Said(status=400, message="no such thing") if failed else solver(model)


def broken(model: Model) -> Said:
    """Fail with status 400 from the second turn on."""
    return solver(model) if model.turn < 1 else Said(status=400, message="no such thing")


SCRIPTS: dict[str, Callable[[Model], Said]] = {
    script.__name__: script
    for script in (solver, wordle, judge, echo, writer, overlong, flaky, broken)
}


class Scripted:
    """The server, from `with` to the end of its block. `requests[case]` are the bodies it saw."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Body]] = defaultdict(list)
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._http = LoopbackServer(self._handle)

    def __enter__(self) -> Scripted:
        self._http.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._http.__exit__(*failure)

    @property
    def url(self) -> str:
        """The server's address, without a path."""
        return self._http.url

    def requests_of(self, case: str) -> list[Body]:
        """Return what came for a case and its parts (`CASE.PART`)."""
        found = [self.requests[name] for name in self.requests if name.split(".")[0] == case]
        return [body for bodies in found for body in bodies]

    async def _handle(self, request: Request) -> Reply:
        await asyncio.sleep(0)
        path = request.path.partition("?")[0]
        match = re.fullmatch(r"/([^/]+)/([^/]+)/v1/(.+)", path)
        if match is None:
            return error(404, f"{path} is not served")
        case, script, what = match.groups()
        if what == "models":
            return reply({"object": "list", "data": [{"id": "model", "object": "model"}]})
        if what not in ("chat/completions", "completions"):
            return error(404, f"{what} is not served")
        body = json.loads(request.body)
        if "chat" in what and not isinstance(body.get("messages"), list):
            return error(400, "messages must be a list")
        if str(body.get("model")).startswith(("gpt", "judge")):
            script = "judge"
        self.requests[case].append(body)
        asked = json.dumps([body.get("model"), body.get("messages"), body.get("prompt")])
        count = self._counts[case][asked]
        self._counts[case][asked] += 1
        model = Model(body, 0 if script == "judge" else count)
        said = SCRIPTS[script](model)
        if said.status != 200:
            return error(said.status, said.message)
        return reply(completion(model, said))


def completion(model: Model, said: Said) -> Body:
    """Return a chat or text completion with vLLM's token fields where they were asked for."""
    body, prompt_ids = model.body, list(prompt_bytes(model))
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 10_000
    text, finish = said.text, said.finish
    spelled = (text or "") + "".join(f"<tool_call>{n} {a}</tool_call>" for n, a in said.calls)
    ids = [*spelled.encode(), 258]
    if len(ids) > limit and not said.calls:
        ids, finish = ids[:limit], "length"
        text = bytes(ids).decode(errors="ignore")
    choice: Body = {"index": 0, "finish_reason": finish}
    unique = hashlib.sha256(f"{model.asked}{text}{said.calls}".encode()).hexdigest()[:8]
    answer: Body = {
        "id": f"cmpl-{unique}",
        "object": "chat.completion" if model.is_chat else "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt_ids) + len(ids),
        },
    }
    logprobs = [-(token % 16 + 1) / 16 for token in ids]
    if model.is_chat:
        choice["message"] = {"role": "assistant", "content": text}
        if said.calls:
            choice["message"]["tool_calls"] = [
                {
                    "id": f"call-{unique}-{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": given},
                }
                for index, (name, given) in enumerate(said.calls)
            ]
    else:
        choice["text"] = text
    as_ids = body.get("return_tokens_as_token_ids")
    shown = [f"token_id:{token}" if as_ids else bytes([token % 256]).hex() for token in ids]
    if body.get("logprobs") and model.is_chat:
        choice["logprobs"] = {
            "content": [
                {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
                for name, value in zip(shown, logprobs, strict=True)
            ]
        }
    elif body.get("logprobs"):
        choice["logprobs"] = {"tokens": shown, "token_logprobs": logprobs}
    if body.get("return_token_ids"):
        (answer if model.is_chat else choice)["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
    return answer


def prompt_bytes(model: Model) -> list[int]:
    """Return the prompt's ids: ChatML with every byte a token, pictures as a single one."""
    if not model.is_chat:
        return list(str(model.body["prompt"]).encode())
    ids: list[int] = []
    for message in model.messages:
        text = text_of([message]) + "".join(
            f"<tool_call>{c['function']['name']} {c['function']['arguments']}</tool_call>"
            for c in message.get("tool_calls") or ()
        )
        ids += [257, *f"{message['role']}\n".encode(), *text.encode(), 258, 10]
    return [*ids, 257, *b"assistant\n"]


def reply(value: Any) -> Reply:
    """Return `value` as JSON."""
    return Reply(200, json.dumps(value).encode())


def error(status: int, message: str) -> Reply:
    """Return an error in OpenAI's form."""
    said = {"error": {"message": message, "type": "BadRequestError", "code": status}}
    return Reply(status, json.dumps(said).encode())
