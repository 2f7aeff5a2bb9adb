"""Passwords and tokens of a recipe are in no file of the run or the cache and in no output; the run stays usable."""

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.redaction import HIDDEN, find_redacted, redact, redacted
from lmmods.data.read.source_reader import SourceReader
from lmmods.recipe.source import Source
from lmmods.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
PASSWORD, SIGNATURE, KEY = "pass-w0rd-planted", "s1gnature-planted", "logger-k3y-planted"


@pytest.fixture
def server(instructions):
    """Return the address of a server for the rows: compressed for names in .gz, status 403 for names in /refused."""
    rows = instructions.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.split("?")[0]
            body = gzip.compress(rows) if name.endswith(".gz") else rows
            self.send_response(403 if name.startswith("/refused") else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def read_all(folder: Path) -> bytes:
    """Return the contents and names of all files."""
    return b"".join(path.read_bytes() + path.name.encode() for path in sorted(folder.rglob("*")) if path.is_file())


def find_secrets(content: bytes | str) -> list[str]:
    content = content.encode() if isinstance(content, str) else content
    return [secret for secret in (PASSWORD, SIGNATURE, KEY) if secret.encode() in content]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_no_file_or_output_of_a_run_contains_a_secret(engine, recipe, server, tmp_path, monkeypatch, capfd):
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path / "run")
    secret = f"http://someone:{PASSWORD}@{server}/rows.jsonl"
    signed = f"http://{server}/signed.jsonl.gz?X-Amz-Expires=60&X-Amz-Signature={SIGNATURE}"
    loggers = [{"class_path": "WandbLogger", "init_args": {"project": "test", "notes": secret}},
               {"class_path": "TensorBoardLogger", "init_args": {
                   "save_dir": str(folder.root), "name": "", "version": "tensorboard", "comment": signed}}]
    sources = {"source": [secret, {"path": signed, "limit": 20}], "val_source": signed, "val_size": 0.0,
               "test_source": {"path": secret}, "predict_source": {"path": signed, "limit": 3}}
    arguments = ["fit", *recipe(engine=engine, trainer__logger=loggers, trainer__max_steps=2,
                                **{f"data__init_args__{key}": value for key, value in sources.items()})]
    arguments.append(f"--data.val_source={secret}")
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert main(arguments) == 0
    wandb.finish()
    assert sys.argv[1:] == arguments  # launchers of further processes read them
    assert main(["predict", *arguments[1:], "--ckpt_path", "last"]) == 0
    wandb.finish()
    assert main(["inspect", *arguments[1:]]) == 0
    assert main(["fit", *arguments[1:], "--print_config"]) == 0
    assert main(["fit", *arguments[1:]]) == 2  # the folder is taken
    assert main(["report", str(folder.root), "--out", str(folder.root / "report.html")]) == 0
    output = capfd.readouterr()
    assert not find_secrets(output.out + output.err)
    assert f"http://{HIDDEN}@{server}/rows.jsonl" in output.out and f"X-Amz-Signature={HIDDEN}" in output.out
    files = [path for path in folder.root.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and any("tfevents" in path.name for path in files)
    assert not find_secrets(read_all(folder.root)) and not find_secrets(read_all(tmp_path / "cache"))
    config = yaml.safe_load(folder.config.read_text())
    assert config["data"]["init_args"]["source"][0] == f"http://{HIDDEN}@{server}/rows.jsonl"
    assert f"http://{HIDDEN}@{server}/rows.jsonl" in (folder.model / "README.md").read_text()

    # The error names the key without its secret; with the secret, config.yaml works.
    source = f"--data.source={json.dumps(sources['source'])}"
    command = ["validate", "--config", str(folder.config), "--ckpt_path", "last"]
    assert main(command) == 2
    assert "data.init_args.source has ***" in capfd.readouterr().err
    assert main([*command, source, f"--data.val_source={secret}", f"--data.test_source={secret}",
                 f"--data.predict_source={signed}"]) == 0


def test_the_fingerprint_of_a_source_does_not_depend_on_its_token(server, instructions):
    def fingerprint(token: str) -> str:
        return SourceReader(Source(f"http://u:{token}@{server}/rows.jsonl?token={token}")).fingerprint()

    assert fingerprint("one") == fingerprint("two")
    reader = SourceReader(Source(f"http://{server}/rows.jsonl.gz?token={SIGNATURE}"))
    rows = [row.values for row in reader]
    assert rows == [json.loads(line) for line in instructions.read_text().splitlines()]
    assert not find_secrets(next(iter(reader)).file)


def test_errors_name_the_source_without_its_secret(recipe, server, capsys):
    for source in (f"http://u:{PASSWORD}@{server}/refused.jsonl?token={SIGNATURE}",
                   f"http://u:{PASSWORD}@{server}/rows.unknown?token={SIGNATURE}",
                   f"nonsense://u:{PASSWORD}@{server}/rows.jsonl?token={SIGNATURE}", f"hf_{'a' * 20}/data/x.jsonl"):
        assert main(["fit", *recipe(data__init_args__source=source)]) == 2
        output = capsys.readouterr()
        assert not find_secrets(output.out + output.err), output.err
        assert "a" * 20 not in output.err and HIDDEN in output.err, output.err
    # Errors of the parser hide secrets, too.
    assert main(["fit", *recipe(data__init_args__no_such_key=f"https://u:{PASSWORD}@host/")]) == 2
    assert main(["fit", *recipe(), f"--data.batch_size=http://u:{PASSWORD}@host/?sig={SIGNATURE}"]) == 2
    output = capsys.readouterr()
    assert not find_secrets(output.out + output.err) and HIDDEN in output.err
    assert main(["merge", "--run", f"http://u:{PASSWORD}@host/"]) == 2
    assert not find_secrets(capsys.readouterr().err)


def test_a_traceback_contains_no_secret():
    code = ("import sys; from lmmods import cli\n"
            "def broken(*_): raise KeyError(sys.argv[1])\n"
            "cli.run_interruptible = broken; cli.main()")
    done = subprocess.run([sys.executable, "-c", code, f"https://u:{PASSWORD}@host/?sig={SIGNATURE}"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "KeyError: 'https://***@host/?sig=***'" in done.stderr
    assert not find_secrets(done.stderr)


@pytest.mark.parametrize(("text", "expected"), [
    ("http://user:word@host/x", "http://***@host/x"), ("https://token@host/x", "https://***@host/x"),
    ("FTP://a:b@h", "FTP://***@h"), ("http://a:b@c@h/x@y", "http://***@h/x@y"), ("http://a:b/c@h/x", "http://***@h/x"),
    ("zip://rows.jsonl::https://a:b@h/x.zip", "zip://rows.jsonl::https://***@h/x.zip"),
    ("a http://a:b@h, 'http://c:d@i'", "a http://***@h, 'http://***@i'"),
    ("https://h/x?a=1&token=t&b=2", "https://h/x?a=1&token=***&b=2"),
    ("https://h/?sv=1&sig=a%2Fb", "https://h/?sv=1&sig=***"),
    ("https://h/x?AWSAccessKeyId=a&Signature=b", "https://h/x?AWSAccessKeyId=***&Signature=***"),
    ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
    ("{'authorization': 'abc'}", "{'authorization': '***'}"),
    (f"hf_{'x' * 34} and ghp_{'y' * 36}", "hf_*** and ghp_***"),
    # no secrets
    ("http://host:8080/a@b", "http://host:8080/a@b"), ("abfs://box@account/x", "abfs://box@account/x"),
    ("ssh://me@host/x", "ssh://me@host/x"), ("hf://datasets/a/b@main/x", "hf://datasets/a/b@main/x"),
    ("https://h/x?download=true", "https://h/x?download=true"), ("key=value; token=x", "key=value; token=x"),
    ("file:///C:/a@b", "file:///C:/a@b"), ("data/**/x_[0-9].jsonl", "data/**/x_[0-9].jsonl"),
])
def test_secrets_are_redacted_and_nothing_else(text, expected):
    assert redact(text) == expected == redact(expected)
    assert bool(list(find_redacted({"k": expected}))) == (HIDDEN in expected and "uthorization" not in expected)


def test_secret_keys_of_loggers_are_redacted_and_similar_keys_are_not():
    recipe = {"logger": {"init_args": {"api_key": KEY, "password": None, "project": "p"}}, "pad_token": "<pad>",
              "columns": {"secret": "instruction"}, "generation": {"max_new_tokens": 8}}
    clean = redacted(recipe)
    assert clean == {**recipe, "logger": {"init_args": {"api_key": HIDDEN, "password": None, "project": "p"}}}
    assert list(find_redacted(clean)) == ["logger.init_args.api_key"] and not list(find_redacted(recipe))
    assert str(UserError(f"see http://u:{PASSWORD}@h")) == "see http://***@h"


WORD = st.text(st.characters(exclude_characters="/\\?#@:&;\"'<>%=[] ", min_codepoint=33, max_codepoint=126), min_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(name=WORD, word=WORD, key=st.sampled_from(["token", "access_key", "X-Goog-Signature", "sig", "api-key"]),
       around=st.tuples(st.text(), st.text()))
def test_any_password_is_redacted_and_redaction_is_idempotent(name, word, key, around):
    url = f"https://{name}:{word}@host/rows.jsonl?{key}={word[::-1]}"
    hidden = redact(url)
    assert hidden == f"https://***@host/rows.jsonl?{key}=***"
    text = f"{around[0]} {url} {around[1]}"
    assert hidden in redact(text) and redact(redact(text)) == redact(text)
