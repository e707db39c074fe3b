"""A small server of OpenEnv's protocol: a countdown, whose messages are those of openenv 0.10."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import WSMsgType, web

SCHEMA = {
    "action": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "metadata": {"type": "object", "additionalProperties": True},
            "message": {"type": "string"},
        },
        "required": ["message"],
    },
    "observation": {},
    "state": {},
}


class Countdown:
    """The model has to say 3, 2, 1; "boom" makes it raise, "hang" never answer, "die" hang up."""

    def __init__(self, max_sessions=8, schema=None, first=3):
        self.max_sessions, self.schema, self.first = max_sessions, schema or SCHEMA, first
        self.num_open = self.most_open = 0
        self.resets, self.headers = [], []

    async def schema_of(self, request):
        self.headers.append(dict(request.headers))
        return web.json_response(self.schema)

    async def session(self, request):
        self.headers.append(dict(request.headers))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open >= self.max_sessions:
            await socket.send_json(error("Server at capacity", "CAPACITY_REACHED"))
            await socket.close()
            return socket
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        left = steps = 0
        try:
            async for got in socket:
                if got.type != WSMsgType.TEXT:
                    break
                message = json.loads(got.data)
                kind, data = message["type"], message.get("data", {})
                if kind == "reset":
                    self.resets.append(data)
                    left, steps = data.get("first", self.first), 0
                    answer = observed(f"Count down from {left}.", None, False)
                elif kind == "state":
                    state = {"episode_id": "e", "step_count": steps}
                    answer = {"type": "state", "data": state}
                elif set(data) != {"message"}:
                    answer = error("Invalid message", "VALIDATION_ERROR", errors=[{"loc": "m"}])
                elif data["message"] == "boom":
                    answer = error("division by zero", "EXECUTION_ERROR")
                elif data["message"] == "die":
                    request.transport.abort()
                    break
                elif data["message"] == "hang":
                    continue
                elif data["message"] == "lie":
                    answer = {"type": "observation", "data": {"reward": 1}}
                else:
                    steps += 1
                    right = data["message"] == str(left)
                    left -= right
                    answer = observed("Next." if right else "No.", float(right), left == 0)
                await socket.send_json(answer)
        finally:
            self.num_open -= 1
        return socket


def observed(text, reward, done):
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(message, code, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@contextmanager
def serving(game):
    """Serve a `Countdown` in a thread of its own, and give its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start():
        app = web.Application()
        app.router.add_get("/ws", game.session)
        app.router.add_get("/schema", game.schema_of)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
