"""vLLM draws the answers of rollouts: a server of its own, over HTTP.

Token ids go in, token ids and their log-probabilities come out: no text is tokenised again on the way. See
docs/rollout_servers.md.
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

PAUSE = 1.0  # seconds before the first retry; doubled for each further one
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # status of what may pass
SEEN = 0.02  # difference of log-probabilities above those that rounding makes
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RELOAD, RESET_CACHE = "/collective_rpc", "/reset_prefix_cache"
DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1, which whole models need to be handed over"
HINTS = {  # what to do where a request is refused
    LOAD_ADAPTER: "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank of "
                  "model.lora.rank (twice that with lora.init: pissa) or more, where it can read the folder of the run",
    RELOAD: f"{DEV_MODE}, where it can read the folder of the run",
    RESET_CACHE: DEV_MODE,
}


class VLLMServer(RolloutServer):
    """Server of vLLM, started with `vllm serve`. Its API key is read from the environment variable VLLM_API_KEY.

    Args:
        url: Address, such as `http://localhost:8000`.
        model: Name under which it serves the model that is trained, usually its hub id or folder.
        timeout: Longest time in seconds that it may take for one answer.
        update_timeout: Longest time in seconds that it may take to load weights.
        retries: How often a request for an answer is repeated if it fails for a reason that may pass.
        concurrency: Answers that are asked for at the same time.
    """

    def __init__(self, url: str, model: str, timeout: float = 600.0, update_timeout: float = 600.0, retries: int = 3,
                 concurrency: int = 128) -> None:
        # Other schemes would open files of this machine.
        require(url.startswith(("http://", "https://")), f"{ARGS}.url", url,
                "an address such as http://localhost:8000")
        require(bool(model), f"{ARGS}.model", model, "the name of the model that it serves")
        for key, value in (("timeout", timeout), ("update_timeout", update_timeout)):
            require(value > 0, f"{ARGS}.{key}", value, "a number of seconds above 0")
        for key, value, least in (("retries", retries, 0), ("concurrency", concurrency, 1)):
            require(value >= least, f"{ARGS}.{key}", value, f"{least} or more")
        self.url, self.model, self.timeout, self.update_timeout = url.rstrip("/"), model, timeout, update_timeout
        self.retries, self.concurrency = retries, concurrency
        # A name is loaded once only, and may be left over from a run that was killed.
        self._names = (f"lmmods-{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._adapter: str | None = None

    def check(self) -> None:
        served = self._json("/v1/models", timeout=min(self.timeout, 30.0), retries=self.retries)
        names = [each.get("id") for each in served.get("data", [])]
        if self.model not in names:
            raise UserError(f"{ARGS}.model is {self.model}, but {self.url} serves {', '.join(map(str, names))}. Name "
                            "one of these, or start it with this model.")
        self._check_logprobs()

    def _check_logprobs(self) -> None:
        """Raise UserError if the temperature is left out of log-probabilities, as vLLM does unless told otherwise."""
        def likeliest(temperature: float) -> dict[str, float]:
            """Log-probabilities of some tokens that may follow a token."""
            choice = self._choice({"model": self.model, "prompt": [1], "logprobs": 5,
                                   "return_tokens_as_token_ids": True, **_sampling(0, temperature, 1, [])})
            return ((choice.get("logprobs") or {}).get("top_logprobs") or [None])[0] or {}

        plain, flat = likeliest(1.0), likeliest(2.0)
        both = plain.keys() & flat.keys()
        if len(both) < 2:
            raise UserError(f"{self.url} returns no log-probabilities of likely tokens. Start it with --max-logprobs 5 "
                            "or more, or with a newer vLLM.")
        # Their differences are half as large at twice the temperature.
        at_one, at_two = (max(found[token] for token in both) - min(found[token] for token in both)
                          for found in (plain, flat))
        if SEEN < at_one < 1.5 * at_two:
            raise UserError(f"{self.url} returns log-probabilities without the temperature. Start it with "
                            "--logprobs-mode processed_logprobs.")

    def update(self, folder: Path, step: int) -> None:
        path = str(folder.resolve())
        if not _is_adapter(folder):
            self._post(RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": path},
                                "timeout": self.update_timeout})
            # Keys and values of the old weights; without the flag they stay while anything runs.
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
            # A request has one seed, so it is for one answer.
            choice = self._choice({"model": self._adapter or self.model, "prompt": ids, "logprobs": 0,
                                   "return_token_ids": True, **_sampling(seed, temperature, max_new_tokens, ends)})
            if choice.get("prompt_token_ids", ids) != ids:
                raise UserError(f"{self.url} answered another prompt than it was given.")
            logps = (choice.get("logprobs") or {}).get("token_logprobs")
            return _read_answer(self.url, choice.get("token_ids"), logps, choice.get("finish_reason"), max_new_tokens,
                                ends)

        pool = ThreadPoolExecutor(self.concurrency)
        try:
            return list(pool.map(lambda each: answer(*each), zip(prompts, seeds, strict=True)))
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        if not self._adapter:
            return
        try:
            self._post(UNLOAD_ADAPTER, {"lora_name": self._adapter})
        except UserError as error:  # what was trained does not depend on it
            warn(f"The last adapter stays loaded: {error}")
        self._adapter = None

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        found = self._json("/v1/completions", body, self.timeout, self.retries)
        if not (isinstance(found, dict) and found.get("choices")):
            raise UserError(f"{self.url} returned no answer to a request for one. Is it a server of vLLM?")
        return found["choices"][0]

    def _json(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0, retries: int = 0) -> Any:
        found = self._ask(path, body, timeout, retries)
        try:
            return json.loads(found)
        except ValueError as error:
            raise UserError(f"{self.url}{path} did not return JSON ({error}). Is it a server of vLLM?") from error

    def _post(self, path: str, body: dict[str, Any]) -> None:
        # Not repeated: a request may have succeeded although its answer was lost.
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
                if error.code not in TRY_AGAIN or attempt == retries:
                    raise UserError(f"{self.url}{path} refused a request with status {error.code}: "
                                    f"{_message(error)}. {self._remedy(path, error.code)}") from error
            except (OSError, http.client.HTTPException) as error:  # the connection, or the time is over
                if attempt == retries:
                    raise UserError(f"{self.url} does not answer ({one_line(error) or type(error).__name__}; attempt "
                                    f"{attempt + 1}, of up to {timeout:g} seconds). Start it with vllm serve (docs/"
                                    f"rollout_servers.md), or raise {ARGS}.timeout and update_timeout.") from error
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    def _remedy(self, path: str, status: int) -> str:
        if status in (401, 403):
            return "Set its API key in the environment variable VLLM_API_KEY."
        return HINTS.get(path.partition("?")[0], "Its own log says more") + "."


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _sampling(seed: int, temperature: float, max_new_tokens: int, ends: Sequence[int]) -> dict[str, Any]:
    """Settings of vLLM that draw from the model's own distribution.

    Each is given, as a server takes what is missing from the model's generation_config.json, end tokens included.
    """
    return {"seed": int(seed), "temperature": temperature, "max_tokens": max_new_tokens, "ignore_eos": True,
            "stop_token_ids": [int(token) for token in ends], "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0}


def _read_answer(source: str, tokens: Sequence[int] | None, logps: Sequence[float | None] | None, reason: str | None,
                 max_new_tokens: int, ends: Sequence[int]) -> SampledAnswer:
    """Return an answer as it came. Raises UserError if anything is missing from it."""
    if not tokens:
        raise UserError(f"{source} returned no token ids of an answer. It must be vLLM 0.11 or later.")
    if logps is None or len(logps) != len(tokens) or any(logp is None or math.isnan(logp) for logp in logps):
        raise UserError(f"{source} returned no log-probabilities of some tokens that it drew. If it has them for "
                        "others, its weights or their precision lead to numbers that are not finite.")
    ended = tokens[-1] in ends
    if not ended and not (reason == "length" and len(tokens) == max_new_tokens):
        raise UserError(f"{source} broke off an answer after {len(tokens)} of up to {max_new_tokens} tokens, with "
                        f"reason {reason}. Its --max-model-len must hold prompt and answer.")
    entropies = np.full(len(tokens), np.nan, np.float32)
    return SampledAnswer(np.array(tokens, np.int32), np.array(logps, np.float32), entropies, ended)


def _message(error: urllib.error.HTTPError) -> str:
    """The words of a refusal: vLLM's errors are JSON, those of a proxy are not."""
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)
        while isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail") if key in found), str(found))
        text = str(found)
    except ValueError:
        pass
    return " ".join(text.split())[:500].rstrip(".") or error.reason
