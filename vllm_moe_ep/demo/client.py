"""A client for vLLM's OpenAI completions API, with the standard library alone."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""


class ClientError(Exception):
    """The server refused a request or cut its answer short; the text holds what it said."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated tokens (all of them, or one chunk of a stream).

    Attributes:
        text: the generated text.
        token_ids: the generated tokens.
        logprobs: of each generated token, natural logarithm.
        finish_reason: "length" or "stop"; None in a chunk that is not the last.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


class CompletionClient:
    """Greedy completions of the one model that a server serves."""

    def __init__(self, base_url: str, timeout_seconds: float = 300.0) -> None:
        self._base_url = base_url
        self._timeout_seconds = timeout_seconds
        # No proxy: the server is on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def complete(self, prompt: Prompt, max_tokens: int, ignore_eos: bool = False) -> Completion:
        """Complete `prompt` by at most `max_tokens` tokens."""
        answer = self._post("/v1/completions", _completion_body(prompt, max_tokens, ignore_eos))
        return _completion(answer["choices"][0])

    def stream(
        self, prompt: Prompt, max_tokens: int, ignore_eos: bool = False
    ) -> Iterator[Completion]:
        """The same in chunks, as they are generated; closing the iterator cancels the request.

        Raises:
            ClientError: the request was refused, or the stream ended without its end mark.
        """
        body = _completion_body(prompt, max_tokens, ignore_eos)
        with self._open("/v1/completions", {**body, "stream": True}) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield _completion(_checked(json.loads(data))["choices"][0])
        raise ClientError(f"{self._base_url} ended a stream before its [DONE] mark.")

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text` by the served model's tokenizer."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        token_ids: list[int] = self._post("/tokenize", body)["tokens"]
        return token_ids

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token | tokens before it) for every token but the first."""
        body = {**_completion_body(token_ids, max_tokens=1), "prompt_logprobs": 0}
        entries = self._post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        pairs = zip(token_ids[1:], entries[1:], strict=True)
        return [entry[str(token_id)]["logprob"] for token_id, entry in pairs]

    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        length: int = self._get("/v1/models")["data"][0]["max_model_len"]
        return length

    def metric(self, name: str) -> float:
        """A Prometheus gauge or counter of the server, summed over its label sets."""
        with self._open("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        values = [line.split()[-1] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        if not values:
            raise ClientError(f"{self._base_url}/metrics has no metric {name}.")
        return sum(map(float, values))

    def _get(self, path: str) -> dict[str, Any]:
        with self._open(path) as answer:
            return _checked(json.load(answer))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._open(path, body) as answer:
            return _checked(json.load(answer))

    @contextlib.contextmanager
    def _open(
        self, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        url = self._base_url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ClientError(f"{url} answered {error.code} {error.reason}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{url} did not answer: {error!r}") from error


def _completion_body(prompt: Prompt, max_tokens: int, ignore_eos: bool = False) -> dict[str, Any]:
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": ignore_eos,
    }


def _completion(choice: dict[str, Any]) -> Completion:
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return Completion(
        text=choice["text"],
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(logprobs),
        finish_reason=choice.get("finish_reason"),
    )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise ClientError(f"The server answered with an error: {answer['error']}")
    return answer
