"""Stands in for `vllm serve`: answers what CompletionClient asks, or misbehaves as told.

Usage: fake_server.py MODE --host HOST --port PORT ...; modes: serve, die, never-ready, child.
With `--moe-backend static-ep`, FAKE_RANKS says how many ranks report their layers, and FAKE_SHIFT
is added to each logprob.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_MODEL_LEN = 8
IS_STATIC_EP = "static-ep" in sys.argv
SHIFT = float(os.environ.get("FAKE_SHIFT", "0")) if IS_STATIC_EP else 0.0


class Handler(BaseHTTPRequestHandler):
    """Token id t has logprob -t / 10; a completion repeats the prompt's last token."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(b"")
        elif self.path == "/metrics":
            self._answer(b'# HELP x\nx_total{a="1"} 2.0\nx_total{a="2"} 3.5\nx_total_other 9\n')
        else:
            self._answer_json({"data": [{"max_model_len": MAX_MODEL_LEN}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            start = [0] if body["add_special_tokens"] else []
            self._answer_json({"tokens": start + [ord(c) - 96 for c in body["prompt"]]})
        elif body["prompt"] == "refuse":
            self.send_error(400, "refused")
        elif body.get("stream"):
            self._stream(body)
        else:
            self._answer_json({"choices": [completion(body)]})

    def _stream(self, body: dict) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            chunk = {"choices": [completion({**body, "max_tokens": 1})]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if body["prompt"] != "cut short":
            self.wfile.write(b"data: [DONE]\n\n")

    def _answer_json(self, content: dict) -> None:
        self._answer(json.dumps(content).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Keep the log free of requests."""


def completion(body: dict) -> dict:
    """What vLLM puts into `choices` for a greedy request."""
    prompt = body["prompt"]
    last = prompt[-1] if isinstance(prompt, list) else 1
    num_tokens = body["max_tokens"]
    choice = {
        "text": chr(96 + last) * num_tokens,
        "token_ids": [last] * num_tokens,
        "logprobs": {"token_logprobs": [-last / 10] * num_tokens},
        "finish_reason": "length",
    }
    if "prompt_logprobs" in body:
        if len(prompt) + num_tokens > MAX_MODEL_LEN:
            return {"prompt_logprobs": "the prompt does not fit"}
        entries = [{str(token_id): {"logprob": -token_id / 10 + SHIFT}} for token_id in prompt[1:]]
        choice["prompt_logprobs"] = [None, *entries]
    return choice


class Server(ThreadingHTTPServer):
    # The queue of five that socketserver sets resets connections when 32 clients come at once.
    request_queue_size = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args()
    if args.mode == "die":
        print("(Worker pid=7) ERROR 12-01 10:00:00 [worker.py:1] ValueError: too few experts")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(3)
    if args.mode == "never-ready":
        print("loading for ever", flush=True)
        time.sleep(600)
    if args.mode == "child":
        # A worker that ignores the polite signals, and whose parent does not end it.
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        print(f"child {child.pid}", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if IS_STATIC_EP:
        for _ in range(int(os.environ.get("FAKE_RANKS", "2"))):
            print("static-ep: replaced 2 of 2 DeepSeek MoE layers with the layer", flush=True)
    Server((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
