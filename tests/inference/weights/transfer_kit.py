"""A receiving server without a model: real processes, real gloo, and a small HTTP front."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from rolltree.scale.weights import buckets, channel
from rolltree.scale.weights.channel import Invitation, accept, receive


def tensors():
    """Mixed dtypes and shapes, among them nothing, one number, and more than a bucket holds."""
    torch.manual_seed(0)
    return {
        "embed": torch.randn(300, 7),
        "half": torch.randn(33, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "eighth": torch.randn(10).to(torch.float8_e4m3fn),
        "turned": torch.randn(20, 30).T,
        "ids": torch.arange(-5, 6, dtype=torch.int32),
    }


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype
        and found[name].shape == value.shape
        and torch.equal(bits(found[name]), bits(value))
        for name, value in expected.items()
    )


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def _no_network(*args):
    raise RuntimeError("no way to the others")


class Worker:
    """One server that keeps what it gets. `fault` says how it fails during a transfer."""

    def __init__(self, fault):
        self.fault, self.channel, self.version, self.held = fault, None, "default", {}
        self.paused, self.broke_off = False, ""

    def init_weight_transfer_engine(self, body):
        if self.fault == "refuse":
            raise ValueError("Invalid init_info for SomeOtherEngine")
        if self.fault == "absent":
            time.sleep(30)
        if self.fault == "isolated":
            channel._GROUPS["gloo"] = _no_network
        self.channel = accept(Invitation(**body["init_info"]), 1, torch.device("cpu"))

    def update_weights(self, body):
        info = body["update_info"]
        expected = buckets.fill_buckets(
            buckets.specs_from_data(info["tensors"]), info["bucket_bytes"]
        )
        if self.fault == "unwilling":
            raise ValueError("no such parameter")
        try:
            for number, found in enumerate(receive(self.channel, expected)):
                self.held.update((name, tensor.clone()) for name, tensor in found)
                if number == 1 and self.fault == "die":
                    os._exit(9)
                if number == 1 and self.fault == "hang":
                    time.sleep(60)
                if number == 1 and self.fault == "choke":
                    raise ValueError("cannot load this")
        except BaseException as error:
            self.channel.close()
            self.broke_off = str(error)
            raise

    def collective_rpc(self, body):
        torch.save(self.held, body["path"])

    def update_weight_version(self, body):
        self.version = body["new_version"]

    def is_paused(self, body):
        return {"is_paused": self.paused, "broke_off": self.broke_off}

    def pause(self, body):
        self.paused = True

    def resume(self, body):
        self.paused = False

    def weight_info(self, body):
        return {"weight_version": self.version}

    def get_world_size(self, body):
        return {"world_size": 1}

    def reset_prefix_cache(self, body):
        return {"success": True}

    def start_weight_update(self, body):
        pass

    def finish_weight_update(self, body):
        pass


def serve(pipe, fault, num_threads=1):
    torch.set_num_threads(num_threads)
    worker = Worker(fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            name = self.path[1:].partition("?")[0]
            try:
                status, value = 200, getattr(worker, name)(body) or {}
            except Exception as error:
                status, value = 500, {"error": f"{type(error).__name__}: {error}"}
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pipe.send(server.server_port)
    server.serve_forever()


class Servers:
    """Starts workers in processes of their own, and ends them."""

    def __init__(self):
        self._context = multiprocessing.get_context("spawn")
        self._processes = []

    def start(self, *faults):
        """Return a root URL per fault (None: a good one)."""
        begun = []
        for fault in faults:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, fault), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            begun.append(ours)
        urls = []
        for pipe in begun:
            assert pipe.poll(60), "a worker did not start"
            urls.append(f"http://127.0.0.1:{pipe.recv()}")
            pipe.close()
        return urls

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
