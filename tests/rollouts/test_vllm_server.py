"""Answers from vLLM, tested with a stand-in for the part of its HTTP interface that is used."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.recipe.trust import ForeignCode, trusting
from lmmods.rollouts import vllm
from lmmods.rollouts.server import RolloutServer, importance_weights, read_server
from lmmods.rollouts.vllm import VLLMServer

END = 1
ENDS = [END, 9]


def make_answer(body: dict) -> list[int]:
    """Return three tokens, or `max_tokens`, that encode the prompt, the seed and the weights."""
    code = 10 + sum(body["prompt"]) + 100 * body["seed"] + 1000 * ("step=" in body["model"])
    return [code, code + 1, END][: body["max_tokens"]]


class StandIn(ThreadingHTTPServer):
    """A stand-in for a vLLM server.

    Attributes:
        change: Called with a path and its reply, which it may change. It may return a status or another reply.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict]] = []
        self.keys: list[str | None] = []
        self.adapters: dict[str, str] = {}
        self.change = lambda path, reply: None
        self.is_processed, self.sharpness = True, 1.0
        self.num_running = self.max_running = 0
        self.guard = threading.Lock()

    def reply(self, path: str, body: dict) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name} for name in ("demo", *self.adapters)]}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": "The lora adapter has already been loaded.", "code": 400}}
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success"
        if path in ("/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"):
            return 200, {"results": [None]}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if body["model"] not in ("demo", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        assert body["ignore_eos"] and body["top_p"] == 1 and body["top_k"] == 0 and body["repetition_penalty"] == 1
        tokens = make_answer(body)
        logprobs = {"token_logprobs": [-0.5 * (n + 1) for n in range(len(tokens))], "tokens": ["?"] * len(tokens)}
        if body["logprobs"]:
            flat = body["temperature"] if self.is_processed else 1.0
            sizes = np.array([-9.0, -2.0, -0.1, 0.0]) * self.sharpness / flat
            log_probs = sizes - np.log(np.exp(sizes).sum())
            logprobs["top_logprobs"] = [{f"token_id:{n}": log_probs[n] for n in range(4)} | {f"token_id:{flat}": -12.0}]
        ended = tokens[-1] in body["stop_token_ids"]
        choice = {"index": 0, "text": "never read", "logprobs": logprobs,
                  "finish_reason": "stop" if ended else "length", "stop_reason": tokens[-1] if ended else None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
        return 200, {"object": "text_completion", "model": body["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        served = self.server
        with served.guard:
            served.num_running += 1
            served.max_running = max(served.max_running, served.num_running)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        served.requests.append((self.path, body))
        served.keys.append(self.headers.get("Authorization"))
        status, reply = served.reply(self.path, body)
        changed = served.change(self.path, reply)
        with served.guard:
            served.num_running -= 1
        if changed == "hang up":
            return
        if isinstance(changed, int):
            status, reply = changed, {"error": {"message": "made to fail", "code": changed}}
        text = (changed if isinstance(changed, str) else json.dumps(reply)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(vllm, "PAUSE", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def make_client(served: StandIn, **settings) -> VLLMServer:
    return VLLMServer(served.url, "demo", **settings)


def draw(client: RolloutServer, count: int = 2, max_new_tokens: int = 5, temperature: float = 0.7):
    return client.draw([[3, 4 + n] for n in range(count)], list(range(count)), temperature, max_new_tokens, ENDS)


def test_a_server_gets_ids_and_returns_ids_and_log_probabilities(served):
    answers = draw(make_client(served), 3)
    for n, answer in enumerate(answers):
        code = 17 + 101 * n
        np.testing.assert_array_equal(answer.tokens, [code, code + 1, END])
        np.testing.assert_array_equal(answer.logps, np.float32([-0.5, -1.0, -1.5]))
        assert answer.tokens.dtype == np.int32 and answer.logps.dtype == answer.entropies.dtype == np.float32
        assert answer.ended and np.isnan(answer.entropies).all() and len(answer.entropies) == 3
    assert sorted(body["seed"] for _, body in served.requests) == [0, 1, 2]
    for path, body in served.requests:
        assert path == "/v1/completions"
        assert body == {"model": "demo", "prompt": [3, 4 + body["seed"]], "logprobs": 0, "return_token_ids": True,
                        "seed": body["seed"], "temperature": 0.7, "max_tokens": 5, "ignore_eos": True,
                        "stop_token_ids": ENDS, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_an_answer_without_an_end_token_has_not_ended(served):
    [truncated] = draw(make_client(served), 1, max_new_tokens=2)
    [complete] = draw(make_client(served), 1, max_new_tokens=3)
    assert not truncated.ended and len(truncated.tokens) == 2
    assert complete.ended  # although it has the maximum length


def test_answers_are_requested_concurrently_and_keep_their_order(served):
    def slow(path, reply):
        # The first ones are slower.
        time.sleep(0.05 if reply["choices"][0]["token_ids"][0] < 500 else 0.0)

    served.change = slow
    answers = draw(make_client(served, concurrency=4), 12)
    assert [answer.tokens[0] for answer in answers] == [17 + 101 * n for n in range(12)]
    assert 2 <= served.max_running <= 4


def test_no_prompts_send_no_request(served):
    assert make_client(served).draw([], [], 1.0, 5, ENDS) == [] and not served.requests


def test_an_adapter_update_loads_a_new_name_and_unloads_the_old(served, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    client, other = make_client(served), make_client(served)
    client.update(tmp_path, 0)
    (first,) = served.adapters
    assert served.adapters[first] == str(tmp_path.resolve())
    assert draw(client, 1)[0].tokens[0] == 1017  # the base model answers 17
    client.update(tmp_path, 4)
    client.update(tmp_path, 4)  # again, as before a validation
    (last,) = served.adapters
    assert last != first and "step=4" in last
    assert [path for path, _ in served.requests if "lora" in path] == [
        "/v1/load_lora_adapter", *["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] * 2]
    other.update(tmp_path, 4)  # from another run
    assert len(served.adapters) == 2
    client.close()
    other.close()
    client.close()
    assert not served.adapters


def test_a_full_model_update_reloads_weights_and_resets_the_prefix_cache(served, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    client = make_client(served, update_timeout=50)
    client.update(tmp_path, 3)
    assert served.requests == [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path.resolve())},
                             "timeout": 50}),
        ("/reset_prefix_cache?reset_running_requests=true", {})]
    assert draw(client, 1)[0].tokens[0] == 17
    client.close()


def test_a_stopped_server_does_not_fail_a_finished_run(served, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    client = make_client(served)
    client.update(tmp_path, 0)
    served.change = lambda path, reply: 500
    client.close()
    assert "warning: The server keeps the last adapter loaded" in capsys.readouterr().out


def test_the_api_key_is_read_from_the_environment(served, monkeypatch):
    draw(make_client(served), 1)
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    draw(make_client(served), 1)
    assert served.keys == [None, "Bearer abc"]


# Checks ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sharpness", [0.0, 0.001, 1.0, 100.0])
def test_a_server_of_the_right_model_passes_the_check(sharpness, served):
    """With confident and unconfident next-token distributions."""
    served.sharpness = sharpness
    make_client(served).check()
    assert served.requests[0][0] == "/v1/models"


def test_a_server_of_another_model_is_rejected(served):
    with pytest.raises(UserError, match="model is other, but http://127.0.0.1:.* serves demo. Set one of these"):
        VLLMServer(served.url, "other").check()


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 100.0])
def test_log_probabilities_without_the_temperature_are_rejected(sharpness, served):
    served.is_processed, served.sharpness = False, sharpness
    with pytest.raises(UserError, match="Start it with --logprobs-mode processed_logprobs"):
        make_client(served).check()


def test_a_server_without_log_probabilities_is_rejected(served):
    served.change = lambda path, reply: "choices" in reply and reply["choices"][0].update(logprobs=None) or None
    with pytest.raises(UserError, match="returns no log-probabilities of the top tokens"):
        make_client(served).check()


def test_a_server_that_does_not_answer_is_rejected(monkeypatch):
    monkeypatch.setattr(vllm, "PAUSE", 0.001)
    with pytest.raises(UserError, match=r"does not answer \(.*refused.*attempt 3.*Start it with vllm serve"):
        VLLMServer("http://127.0.0.1:9", "demo", retries=2).check()


# Failures -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("failure", [503, 429, "hang up"])
def test_temporary_failures_are_retried(served, failure):
    failures = [failure, failure]
    served.change = lambda path, reply: failures.pop() if failures else None
    assert draw(make_client(served, retries=2), 1)[0].ended
    assert len(served.requests) == 3


@pytest.mark.parametrize(("failure", "message"), [
    (500, "rejected a request with status 500: made to fail. See its own log"),
    ("hang up", "does not answer .*attempt 3")])
def test_retries_are_limited(served, failure, message):
    served.change = lambda path, reply: failure
    with pytest.raises(UserError, match=message):
        draw(make_client(served, retries=2), 1)
    assert len(served.requests) == 3


def test_a_slow_answer_times_out(served):
    served.change = lambda path, reply: time.sleep(0.2)
    with pytest.raises(UserError, match="does not answer .*timed out.*raise model.rollouts.init_args.timeout"):
        draw(make_client(served, timeout=0.05, retries=0), 1)


@pytest.mark.parametrize(("path", "update", "remedy"), [
    ("/v1/load_lora_adapter", "adapter_config.json", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora"),
    ("/collective_rpc", "config.json", "VLLM_SERVER_DEV_MODE=1"),
    ("/reset_prefix_cache", "config.json", "VLLM_SERVER_DEV_MODE=1")])
def test_a_rejected_weight_update_names_the_remedy_and_is_not_retried(path, update, remedy, served, tmp_path):
    (tmp_path / update).write_text("{}")
    served.change = lambda requested_path, reply: 404 if requested_path.startswith(path) else None
    with pytest.raises(UserError, match=f"status 404: made to fail. Start it with .*{remedy}"):
        make_client(served).update(tmp_path, 0)
    assert [requested_path.startswith(path) for requested_path, _ in served.requests].count(True) == 1


def test_a_missing_api_key_is_named(served):
    served.change = lambda path, reply: 401
    with pytest.raises(UserError, match="Set its API key in the environment variable VLLM_API_KEY"):
        make_client(served).check()
    assert len(served.requests) == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"token_ids": None}, "returned an answer without token ids. Install vLLM 0.11"),
    ({"token_ids": []}, "without token ids"),
    ({"logprobs": None}, "tokens without log-probabilities"),
    ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "tokens without log-probabilities"),
    ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -1.0]}}, "numbers that are not finite"),
    ({"logprobs": {"token_logprobs": [-1.0]}}, "tokens without log-probabilities"),
    ({"finish_reason": "abort", "token_ids": [5, 6, 7]}, "an answer after 3 of up to 5 tokens, with reason abort"),
    ({"finish_reason": "length", "token_ids": [5, 6, 7]}, "a --max-model-len that covers prompt and answer"),
    ({"finish_reason": "stop", "token_ids": [5, 6, 7]}, "with reason stop"),
    ({"prompt_token_ids": [0, 3, 4]}, "answered another prompt than it was sent")])
def test_an_incomplete_answer_is_rejected(changes, message, served):
    served.change = lambda path, reply: reply["choices"][0].update(changes)
    with pytest.raises(UserError, match=message):
        draw(make_client(served), 1)


@pytest.mark.parametrize(("text", "message"), [
    ("<html>", "did not return JSON"), ("{}", "did not return an answer"),
    ('{"choices": []}', "did not return an answer"), ("[]", "did not return an answer")])
def test_a_server_that_is_not_vllm_is_rejected(text, message, served):
    served.change = lambda path, reply: text
    with pytest.raises(UserError, match=f"{message}.*Check that the address is a vLLM server"):
        draw(make_client(served), 1)


def test_a_failed_request_stops_the_remaining_ones(served):
    served.change = lambda path, reply: 400
    with pytest.raises(UserError, match="status 400"):
        draw(make_client(served, concurrency=1), 50)
    assert len(served.requests) < 50


# Recipes --------------------------------------------------------------------------------------------------------------

def test_a_recipe_can_name_a_server():
    server = read_server({"class_path": "VLLMServer", "init_args": {"url": "http://localhost:8000/", "model": "m"}})
    assert isinstance(server, VLLMServer) and (server.url, server.model) == ("http://localhost:8000", "m")


@pytest.mark.parametrize(("settings", "message"), [
    ("VLLMServer", "must be {class_path: VLLMServer"), ({"init_args": {}}, "must be {class_path: VLLMServer"),
    ({"class_path": "VLLMServe"}, "must be VLLMServer or .*Did you mean VLLMServer?"),
    ({"class_path": "VLLMServer", "url": "http://h"},
     "model.rollouts.url is not a key. Set it under model.rollouts.init_args."),
    ({"class_path": "VLLMServer", "init_args": []}, "is missing"),
    ({"class_path": "VLLMServer", "init_args": [1]}, "must be a mapping"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h"}}, "init_args.model is missing"),
    ({"class_path": "VLLMServer", "init_args": {"urls": "http://h"}},
     "urls is not a key. The keys there are url, model, .*Did you mean url?"),
    ({"class_path": "VLLMServer", "init_args": {"url": "file:///etc", "model": "m"}}, "url is file:///etc"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h", "model": ""}}, "model is , but must be"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h", "model": "m", "timeout": 0}}, "timeout is 0"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h", "model": "m", "timeout": "1h"}}, "timeout is 1h"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h", "model": "m", "retries": -1}}, "retries is -1"),
    ({"class_path": "VLLMServer", "init_args": {"url": "http://h", "model": "m", "concurrency": 0}}, "concurrency")])
def test_wrong_server_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        read_server(settings)


def test_a_custom_server_class_needs_trust():
    settings = {"class_path": f"{__name__}.OwnServer", "init_args": {"size": 3}}
    with pytest.raises(ForeignCode, match="is code outside of lightning, torch, lmmods"):
        read_server(settings)
    with trusting(True):
        assert read_server(settings).size == 3
        for path, message in ((f"{__name__}.StandIn", "must be a subclass of lmmods.rollouts.server.RolloutServer"),
                              (f"{__name__}.Nothing", "there is no such class"), ("no.such", "there is no such class")):
            with pytest.raises(UserError, match=message):
                read_server({"class_path": path})


class OwnServer(RolloutServer):
    def __init__(self, size: int) -> None:
        self.size = size

    check = update = draw = close = None


# Weights of tokens ----------------------------------------------------------------------------------------------------

def test_importance_weights_equal_trl():
    """TRL's token_truncate is the ratio, clamped from above."""
    import torch

    rng = np.random.default_rng(0)
    train_logps = rng.uniform(-5, 0, (4, 6)).astype(np.float32)
    sampler_logps = train_logps + rng.normal(0, 1, (4, 6)).astype(np.float32)
    sampler_logps[0, 0] = -200  # a ratio beyond float32
    weights = importance_weights(train_logps, sampler_logps, 2.0)
    expected = torch.clamp(torch.exp(torch.tensor(train_logps) - torch.tensor(sampler_logps)), max=2.0)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == np.float32 and weights.max() == 2 and weights.min() < 1


def test_equal_probabilities_have_weight_1_and_missing_ones_have_none():
    np.testing.assert_array_equal(importance_weights(np.float32([-1, -2]), np.float32([-1, np.nan]), 2.0), [1, np.nan])
