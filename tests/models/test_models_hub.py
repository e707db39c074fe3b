"""Names of the Hugging Face hub, against a server that has the hub's shape."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants  # noqa: F401  before a test sets its variables
import pytest

from rolltree._helpers import hub
from rolltree.inference.models import check_loadable, load_tokenizer, resolve_model
from rolltree.values.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"
TOKEN = "hf_secretOfTheTest"


class Hub(ThreadingHTTPServer):
    """Repositories of one commit each: `repos[kind, name, revision] = (commit, files)`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.private, self.asked = {}, set(), []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(has_body=False)

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def log_message(self, *_):
        pass

    def answer(self, has_body=True):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        status, headers, body = self.found(path)
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def found(self, path):
        if path == "/":
            return 200, {}, b"hub"
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        revision = rest[1] if len(rest) > 1 else "main"
        at = self.server.repos.get((kind, name, revision)) or next(
            (
                each
                for key, each in self.server.repos.items()
                if (kind, name) == key[:2] and each[0] == revision
            ),
            None,
        )
        if at is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit, files = at
        return self.api(name, commit, files, rest) if is_api else self.file(commit, files, rest)

    def api(self, name, commit, files, rest):
        listed = [
            {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for file, data in files.items()
        ]
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            found = [each for each in listed if each["path"].startswith(below)]
            return self.json(found)
        if rest[:1] == ["paths-info"]:
            return self.json([each for each in listed if each["path"].encode() in self.body])
        siblings = [{"rfilename": file} for file in files]
        return self.json(
            {
                "id": name,
                "sha": commit,
                "siblings": siblings,
                "tags": [],
                "private": False,
                "downloads": 0,
            }
        )

    def json(self, value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def file(self, commit, files, rest):
        data = files.get("/".join(rest[2:]))
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data


@pytest.fixture(scope="module")
def server():
    tiny = resolve_model("tiny")
    files = {file.name: file.read_bytes() for file in tiny.iterdir() if file.is_file()}
    found = Hub()
    found.repos["models", "someone/tiny", "main"] = (
        COMMIT,
        {**files, "evil.py": b"raise SystemExit"},
    )
    found.repos["models", "someone/tiny", "older"] = (OTHER, {**files, "README.md": b"old"})
    found.repos["models", "someone/locked", "main"] = (COMMIT, files)
    found.private.add("someone/locked")
    rows = "".join(json.dumps({"question": f"q{n}", "answer": str(n)}) + "\n" for n in range(4))
    found.repos["datasets", "someone/rows", "main"] = (
        COMMIT,
        {"train.jsonl": rows.encode(), "test.jsonl": rows.splitlines()[0].encode()},
    )
    yield found
    found.shutdown()
    found.server_close()


def run(code, server, home, **env):
    """Run code in a process: the client reads its settings when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    own = {"HF_HOME": str(home), "HF_ENDPOINT": server.url, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**kept, **own},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_model_is_downloaded_once_and_then_needs_no_hub(server, tmp_path):
    code = (
        "import rolltree as rt\n"
        "from rolltree.inference.models.load import local_model_folder\n"
        "model, tokenizer = rt.load_model('someone/tiny')\n"
        "print(local_model_folder('someone/tiny'), len(tokenizer))"
    )
    said = run(code, server, tmp_path)
    folder = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / COMMIT
    assert said.split() == [str(folder), "265"]
    assert not (folder / "evil.py").exists()  # code is not even downloaded
    server.asked.clear()
    assert run(code, server, tmp_path, HF_HUB_OFFLINE="1") == said
    assert run(code, server, tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == said
    assert server.asked == []


@pytest.mark.slow
def test_a_revision_and_a_token_from_its_own_place(server, tmp_path):
    code = "from rolltree.inference.models import resolve_model\nprint(resolve_model('{}').name)"
    assert run(code.format("someone/tiny@older"), server, tmp_path).strip() == OTHER
    (tmp_path / "token").write_text(TOKEN)
    assert run(code.format("someone/locked"), server, tmp_path).strip() == COMMIT
    refused = (
        "from rolltree.values.errors import ConfigError\n"
        "from rolltree.inference.models import resolve_model\n"
        "try: resolve_model('{}')\nexcept ConfigError as error: print(error)"
    )
    said = run(refused.format("someone/locked"), server, tmp_path / "no-token")
    assert "hf auth login" in said
    assert "hf download someone/locked" in said
    assert "could not be downloaded (RepositoryNotFoundError" in run(
        refused.format("someone/absent"), server, tmp_path
    )


@pytest.mark.long
def test_rows_of_the_hub_are_a_data_set(server, tmp_path):
    code = (
        "import rolltree as rt\n"
        "env = rt.SingleTurnEnv(dataset='someone/rows', eval_dataset='someone/rows@main:test')\n"
        "answer = env.example('train', 1)['answer']\n"
        "print(env.num_examples('train'), env.num_examples('eval'), answer)"
    )
    assert run(code, server, tmp_path).split() == ["4", "1", "1"]
    assert run(code, server, tmp_path, HF_ENDPOINT="http://127.0.0.1:9").split() == ["4", "1", "1"]


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_hub_it_says_at_once_what_to_download_and_where_to(
    offline, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    hub._reached.cache_clear()
    for ask in (check_loadable, load_tokenizer):
        began = time.monotonic()
        with pytest.raises(ConfigError) as refused:
            ask("Qwen/Qwen3-0.6B@abc")
        assert time.monotonic() - began < 10
        for said in (
            "hf download Qwen/Qwen3-0.6B --revision abc",
            f"models--Qwen--Qwen3-0.6B to {tmp_path / 'hub'}",
            "HF_HUB_OFFLINE is set" if offline else "no answer from http://127.0.0.1:9",
        ):
            assert said in str(refused.value)
    hub._reached.cache_clear()


def test_a_hub_that_never_answers_costs_seconds(monkeypatch):
    monkeypatch.setattr(hub, "WAIT_S", 0.1)
    monkeypatch.setattr(hub, "_asked", lambda url: threading.Event().wait(60))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub._reached.cache_clear()
    began = time.monotonic()
    assert not hub.answers()
    assert time.monotonic() - began < 5
    hub._reached.cache_clear()


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("a/b@v1.0", "a/b", "v1.0"),
        ("./a/b", None, None),
        ("a/b/c", None, None),
        ("tiny", None, None),
        ("/a/b", None, None),
        ("../b", None, None),
    ],
)
def test_names(text, repo, revision):
    found = hub.hub_name(text)
    assert (found.repo, found.revision) == (repo, revision) if found else repo is None
