"""Hub ids that cannot be downloaded are one message, within seconds, from every command."""

import http.server
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from huggingface_hub import constants

from lmmods.cli import main
from lmmods.core import hub
from lmmods.core.errors import UserError

ROWS = [{"instruction": f"Say a {n} times.", "output": "a " * (n % 5 + 1)} for n in range(20)]


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Reset the hub state with an empty cache; return a function that sets the hub's address."""
    import datasets

    for name in hub.OFFLINE:
        monkeypatch.setenv(name, "")  # so that changes by `work_offline` are undone
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")
    hub.unreachable_reason.cache_clear(), hub._warn_once.cache_clear()
    yield lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)
    hub.unreachable_reason.cache_clear(), hub._warn_once.cache_clear()


@pytest.fixture
def refused(online):
    """Return the address of a hub that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        online(address)
        yield address


@contextmanager
def start_hub(status: int, code: str | None = None):
    """Start a hub that answers file requests with a status; yield its address and the requested paths."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            requests.append(self.path)
            self.send_response(status if status >= 500 or "resolve" in self.path else 200)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 - as the standard library names it

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


COMMANDS = {
    "new-model": ["new", "mine", "--model", "some/thing", "--data", "rows.jsonl"],
    "new-data": ["new", "mine", "--model", "MODEL", "--data", "some/thing"],
    "new-tokenizer": ["new", "mine", "--model", "MODEL", "--data", "rows.jsonl", "--tokenizer", "some/thing"],
    "chat": ["chat", "--model", "some/thing", "--prompt", "Hi"],
    **{f"{command}-{key}-{engine}": [command, "--config", "recipe.json", "--engine", engine, f"--{key}", "some/thing",
                                         *(["--on", "1xH100"] if command == "plan" else [])]
       for command, engine, keys in (("fit", "torch", ("model.pretrained", "data.tokenizer", "data.source")),
                                     ("fit", "jax", ("model.pretrained", "data.val_source")),
                                     ("inspect", "torch", ("model.pretrained",)), ("plan", "jax", ("model.config",)))
       for key in keys}}
BUILDS = {"fit-model.pretrained-jax", "plan-model.config-jax"}  # these import an engine


@pytest.mark.parametrize("command", [pytest.param(name, marks=[pytest.mark.slow] if name in BUILDS else [])
                                     for name in COMMANDS])
def test_every_command_reports_at_once_that_the_hub_is_unreachable(
        refused, command, tmp_path, monkeypatch, llama_folder, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.json").write_text(json.dumps({
        "trainer": {"max_steps": 1, "default_root_dir": "run"},
        "model": {"class_path": "SFT", "init_args": {"pretrained": str(llama_folder)}},
        "data": {"class_path": "SFTData", "init_args": {"source": "rows.jsonl", "template": "alpaca"}}}))
    words = [str(llama_folder) if word == "MODEL" else word for word in COMMANDS[command]]
    words += ["--model.pretrained", "null"] if "model.config" in command else []
    start = time.monotonic()
    assert main(words) == 2
    seconds, output = time.monotonic() - start, capsys.readouterr()
    [line] = [line for line in output.err.splitlines() if line]
    assert line.startswith("error: ") and f"the hub ({refused}) cannot be reached (Connection refused)" in line
    assert "no folder 'some/thing'" in line and "has nothing" in line and "HF_HUB_OFFLINE=1" in line
    assert "repo_type" not in line and "Retry" not in output.err + output.out + caplog.text
    assert seconds < 30  # mostly imports; the retries of the libraries alone take longer


def test_a_silent_host_is_reported_after_the_timeout_and_not_asked_again(online):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(UserError, match=r"cannot be reached \((no answer within 0.5 seconds|.*timed out)\)"):
            load_model_config()
        with pytest.raises(UserError):  # no second request
            load_model_config()
        assert time.monotonic() - start < 3


def load_model_config(name="some/thing", **options):
    from lmmods.core.hf_config import load_config

    return load_config(name, **options)


def test_cached_files_are_used_and_missing_ones_named(refused, tmp_path, capsys, llama_folder):
    folder = tmp_path / "hub" / "models--some--thing"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((llama_folder / "config.json").read_text())
    assert load_model_config().model_type == "llama" and load_model_config().model_type == "llama"
    assert capsys.readouterr().out.count("using cached files") == 1
    from lmmods.data.encode.tokenizer import TokenizerOptions

    with pytest.raises(UserError, match=r"tokenizer: .* has config.json, which is not enough \(\w+"):
        assert TokenizerOptions("some/thing").loaded
    with pytest.raises(UserError, match=r"has other revisions \(c0ffee\).*--revision v2"):
        load_model_config(revision="v2")


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_missing_weights_in_the_cache_are_reported(refused, engine, tmp_path, llama_folder):
    snapshot = tmp_path / "hub" / "models--thing" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((llama_folder / "config.json").read_text())
    with pytest.raises(UserError, match="cannot be reached .* has config.json, which is not enough"):
        if engine == "torch":
            import transformers

            from lmmods.torch_engine.nn.loading import load_pretrained

            load_pretrained(transformers.AutoModelForCausalLM, "thing")
        else:
            from jax_engine.models.loading import _download

            _download("thing", None)


def test_an_error_names_the_variable_that_set_the_hub_offline(online, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="is not asked, as HF_HUB_OFFLINE is set"):
        load_model_config()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("status", "code", "message"), [
    (503, None, r"cannot be reached \(it answers with status 503\)"),
    (401, "RepoNotFound", "no model of this name, or a private one"), (403, "GatedRepo", "it is gated. Accept"),
    (404, "RevisionNotFound", "this model has no revision 'v2'")])
def test_error_statuses_of_the_hub_are_explained(online, monkeypatch, status, code, message):
    with start_hub(status, code) as (address, requests):
        online(address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            address + "/{repo_id}/resolve/{revision}/{filename}")
        with pytest.raises(UserError, match=message):
            load_model_config(revision="v2")
        assert len(requests) <= 3 and (status != 503 or requests == ["/"])


@pytest.mark.parametrize("name", ["a/b/c", "some/.thing", "two words"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_an_error(online, name):
    with pytest.raises(UserError, match=f"there is no folder '{name}', and a hub id has the form owner/name"):
        load_model_config(name)


def test_hub_file_addresses_report_an_unreachable_hub(refused):
    from lmmods.data.read.source_reader import find_files

    with pytest.raises(UserError, match=r"hf://datasets/a/b/c.jsonl: the hub .* cannot be reached .*use its pa"):
        find_files("hf://datasets/a/b/c.jsonl")


def test_waiting_for_the_network_ends_after_the_timeout():
    assert hub.ask_with_timeout(lambda: time.sleep(1) or "", 0.05) == "no answer within 0.05 seconds"
