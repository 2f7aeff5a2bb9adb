"""Sample the answers of rollouts with a vLLM server, over HTTP.

Requests and replies contain token ids, so no text is tokenised again. See docs/rollout_servers.md.
"""

import http.client
import itertools
import json
import math
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lmmods.core.console import warn
from lmmods.core.errors import UserError, one_line
from lmmods.core.settings import require
from lmmods.rollouts.policy import SampledAnswer
from lmmods.rollouts.server import ARGS, RolloutServer

PAUSE = 1.0  # seconds before the first retry, doubled for each later one
RETRIED = (408, 425, 429, 500, 502, 503, 504)  # status codes of failures that may be temporary
MIN_SPREAD = 0.02  # smallest difference of log-probabilities that is surely not rounding
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RELOAD, RESET_CACHE = "/collective_rpc", "/reset_prefix_cache"
DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1, which loading full models requires"
CHECK_PROGRAM = "Check that the address is a vLLM server's."
HINTS = {  # what to do if a request to a path is rejected
    LOAD_ADAPTER: "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank of "
                  "model.lora.rank (twice that with lora.init: pissa) or more, where it can read the run folder",
    RELOAD: f"{DEV_MODE}, where it can read the run folder",
    RESET_CACHE: DEV_MODE,
}


class VLLMServer(RolloutServer):
    """A vLLM server, started with `vllm serve`. Its API key is read from the environment variable VLLM_API_KEY.

    Args:
        url: Address of the server, for example `http://localhost:8000`.
        model: Name under which the server has the model in training, usually its hub id or folder.
        timeout: Maximum seconds for one answer.
        update_timeout: Maximum seconds to load weights.
        retries: Maximum number of retries of a request for an answer, after failures that may be temporary.
        concurrency: Maximum number of answers requested at the same time.
    """

    def __init__(self, url: str, model: str, timeout: float = 600.0, update_timeout: float = 600.0, retries: int = 3,
                 concurrency: int = 128) -> None:
        # urllib also opens file:// addresses.
        require(url.startswith(("http://", "https://")), f"{ARGS}.url", url,
                "an address such as http://localhost:8000")
        require(bool(model), f"{ARGS}.model", model, "the name of the model that the server has")
        for key, value in (("timeout", timeout), ("update_timeout", update_timeout)):
            require(value > 0, f"{ARGS}.{key}", value, "a number of seconds above 0")
        for key, value, minimum in (("retries", retries, 0), ("concurrency", concurrency, 1)):
            require(value >= minimum, f"{ARGS}.{key}", value, f"{minimum} or more")
        self.url, self.model, self.timeout, self.update_timeout = url.rstrip("/"), model, timeout, update_timeout
        self.retries, self.concurrency = retries, concurrency
        # Random, as vLLM loads a name only once and a killed run may have left adapters.
        self._names = (f"lmmods-{secrets.token_hex(4)}-{index}" for index in itertools.count())
        self._adapter: str | None = None

    def check(self) -> None:
        served = self._json("/v1/models", timeout=min(self.timeout, 30.0), retries=self.retries)
        names = [entry.get("id") for entry in served.get("data", [])]
        if self.model not in names:
            raise UserError(f"{ARGS}.model is {self.model}, but {self.url} serves {', '.join(map(str, names))}. Set "
                            "one of these, or start the server with this model.")
        self._check_logprobs()

    def _check_logprobs(self) -> None:
        """Raise UserError if log-probabilities ignore the temperature, which is vLLM's default."""
        def request_top_logprobs(temperature: float) -> dict[str, float]:
            """Return log-probabilities of a few tokens that may follow token 1."""
            choice = self._choice({"model": self.model, "prompt": [1], "logprobs": 5,
                                   "return_tokens_as_token_ids": True, **_sampling_settings(0, temperature, 1, [])})
            return ((choice.get("logprobs") or {}).get("top_logprobs") or [None])[0] or {}

        at_one, at_two = request_top_logprobs(1.0), request_top_logprobs(2.0)
        shared = at_one.keys() & at_two.keys()
        if len(shared) < 2:
            raise UserError(f"{self.url} returns no log-probabilities of the top tokens. Start it with --max-logprobs "
                            "5 or more, or install a newer vLLM.")
        # Differences of log-probabilities halve when the temperature doubles.
        spread, halved = (max(logprobs[token] for token in shared) - min(logprobs[token] for token in shared)
                          for logprobs in (at_one, at_two))
        if MIN_SPREAD < spread < 1.5 * halved:
            raise UserError(f"{self.url} returns log-probabilities without the temperature. Start it with "
                            "--logprobs-mode processed_logprobs.")

    def update(self, folder: Path, step: int) -> None:
        path = str(folder.resolve())
        if not _is_adapter(folder):
            self._post(RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": path},
                                "timeout": self.update_timeout})
            # Removes keys and values of the old weights; without the flag they stay while a request runs.
            self._post(f"{RESET_CACHE}?reset_running_requests=true", {})
            return
        name = f"{next(self._names)}-step={step}"
        self._post(LOAD_ADAPTER, {"lora_name": name, "lora_path": path})
        old, self._adapter = self._adapter, name
        if old:
            self._post(UNLOAD_ADAPTER, {"lora_name": old})

    def draw(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, max_new_tokens: int,
             ends: Sequence[int]) -> list[SampledAnswer]:
        def answer(prompt: Sequence[int], seed: int) -> SampledAnswer:
            ids = [int(token) for token in prompt]
            # A request has one seed, so it samples one answer.
            settings = _sampling_settings(seed, temperature, max_new_tokens, ends)
            choice = self._choice({"model": self._adapter or self.model, "prompt": ids, "logprobs": 0,
                                   "return_token_ids": True, **settings})
            if choice.get("prompt_token_ids", ids) != ids:
                raise UserError(f"{self.url} answered another prompt than it was sent. {CHECK_PROGRAM}")
            logps = (choice.get("logprobs") or {}).get("token_logprobs")
            return _read_answer(self.url, choice.get("token_ids"), logps, choice.get("finish_reason"), max_new_tokens,
                                ends)

        pool = ThreadPoolExecutor(self.concurrency)
        try:
            return list(pool.map(lambda request: answer(*request), zip(prompts, seeds, strict=True)))
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        if not self._adapter:
            return
        try:
            self._post(UNLOAD_ADAPTER, {"lora_name": self._adapter})
        except UserError as error:  # the trained model does not depend on it
            warn(f"The server keeps the last adapter loaded: {error}")
        self._adapter = None

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._json("/v1/completions", body, self.timeout, self.retries)
        if not (isinstance(reply, dict) and reply.get("choices")):
            raise UserError(f"{self.url} did not return an answer. {CHECK_PROGRAM}")
        return reply["choices"][0]

    def _json(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0, retries: int = 0) -> Any:
        reply = self._ask(path, body, timeout, retries)
        try:
            return json.loads(reply)
        except ValueError as error:
            raise UserError(f"{self.url}{path} did not return JSON ({error}). {CHECK_PROGRAM}") from error

    def _post(self, path: str, body: dict[str, Any]) -> None:
        # Not retried, as the request may have succeeded although its reply was lost.
        self._ask(path, body, self.update_timeout, retries=0)

    def _ask(self, path: str, body: dict[str, Any] | None, timeout: float, retries: int) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        for attempt in itertools.count():
            try:
                with urllib.request.urlopen(request, timeout=timeout) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED or attempt == retries:
                    raise UserError(f"{self.url}{path} rejected a request with status {error.code}: "
                                    f"{_read_message(error)}. {self._remedy(path, error.code)}") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, or a timeout
                if attempt == retries:
                    raise UserError(f"{self.url} does not answer ({one_line(error) or type(error).__name__}; attempt "
                                    f"{attempt + 1}, of up to {timeout:g} seconds). Start it with vllm serve (docs/"
                                    f"rollout_servers.md), or raise {ARGS}.timeout and update_timeout.") from error
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    def _remedy(self, path: str, status: int) -> str:
        if status in (401, 403):
            return "Set its API key in the environment variable VLLM_API_KEY."
        return HINTS.get(path.partition("?")[0], "See its own log") + "."


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _sampling_settings(seed: int, temperature: float, max_new_tokens: int, ends: Sequence[int]) -> dict[str, Any]:
    """Return vLLM settings that sample from the model's unchanged distribution.

    All are set, as the server takes missing ones, end tokens included, from the model's generation_config.json.
    """
    return {"seed": int(seed), "temperature": temperature, "max_tokens": max_new_tokens, "ignore_eos": True,
            "stop_token_ids": [int(token) for token in ends], "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0}


def _read_answer(source: str, tokens: Sequence[int] | None, logps: Sequence[float | None] | None, reason: str | None,
                 max_new_tokens: int, ends: Sequence[int]) -> SampledAnswer:
    """Return the answer in a reply. Raises UserError if anything is missing."""
    if not tokens:
        raise UserError(f"{source} returned an answer without token ids. Install vLLM 0.11 or later there.")
    if logps is None or len(logps) != len(tokens) or any(logp is None or math.isnan(logp) for logp in logps):
        raise UserError(f"{source} returned sampled tokens without log-probabilities. If others have one, check "
                        "its weights and precision, which may lead to numbers that are not finite.")
    ended = tokens[-1] in ends
    if not ended and not (reason == "length" and len(tokens) == max_new_tokens):
        raise UserError(f"{source} ended an answer after {len(tokens)} of up to {max_new_tokens} tokens, with "
                        f"reason {reason}. Start it with a --max-model-len that covers prompt and answer.")
    entropies = np.full(len(tokens), np.nan, np.float32)
    return SampledAnswer(np.array(tokens, np.int32), np.array(logps, np.float32), entropies, ended)


def _read_message(error: urllib.error.HTTPError) -> str:
    """Return the text of an error reply, which is JSON from vLLM but may be anything from a proxy."""
    text = error.read().decode(errors="replace")
    try:
        value = json.loads(text)
        while isinstance(value, dict):
            value = next((value[key] for key in ("error", "message", "detail") if key in value), str(value))
        text = str(value)
    except ValueError:
        pass
    return " ".join(text.split())[:500].rstrip(".") or error.reason
