"""What the scripted model says to the environments of `old_style`."""

import json
import re


def answer(messages):
    """Repeat what was asked for, call the named tool, or report what a tool said."""
    last = messages[-1]
    if last["role"] == "tool":
        return f"Seen: {last['content']}"
    text = last["content"]
    call = re.fullmatch(r"Call (\w+) (\{.*\})", text)
    if call:
        function = {"name": call[1], "arguments": json.dumps(json.loads(call[2]))}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return text.partition("Reply with: ")[2]
