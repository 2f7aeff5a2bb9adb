"""Uploads of the model to the Hugging Face hub, at the end or at each checkpoint, for both engines."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError, first_line
from lmmods.core.files import read_text
from lmmods.core.redaction import redact
from lmmods.recipe.block_fields import PublishFields
from lmmods.runs.folder import write_json
from lmmods.runs.published_paths import is_local_path
from lmmods.runs.run_files import OWNER


class Publisher(PublishFields):
    """Uploader of a run's model to a hub repository."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._upload: threading.Thread | None = None
        self._has_warned = False

    def problem(self) -> str | None:
        """Create the repository. Returns an error message if it cannot be used, else None."""
        from huggingface_hub import HfApi, get_token

        if get_token() is None:
            return (f"publish.repo is {self.repo}, but there is no Hugging Face token. Set HF_TOKEN in the environment "
                    "or run `hf auth login`, or set publish.repo to null.")
        assert self.repo is not None
        try:
            HfApi().create_repo(self.repo, private=self.private, exist_ok=True)
            is_private = HfApi().repo_info(self.repo).private
        except Exception as error:  # many types: network, permissions, name
            return (f"publish.repo: {self.repo} cannot be created or written ({_format(error)}). Check name, token and "
                    "network, or set publish.repo to null and upload later.")
        if is_private != self.private:
            return (f"publish.private is {self.private}, but {self.repo} exists and is "
                    f"{'private' if is_private else 'public'}. Set publish.private to {is_private}, or name another "
                    "repository.")
        return None

    @property
    def is_busy(self) -> bool:
        """True while an upload is running."""
        return self._upload is not None and self._upload.is_alive()

    def start_upload(self, folder: Path, step: int) -> None:
        """Upload `folder` in the background and delete it afterwards."""
        self._upload = threading.Thread(target=self._upload_and_remove, args=(folder, step), daemon=True)
        self._upload.start()

    def _upload_and_remove(self, folder: Path, step: int) -> None:
        try:
            self._send(folder, f"Step {step}")
        except Exception as error:  # no error of an upload may stop training
            if not self._has_warned:
                warn(f"The upload of step {step} to {self.repo} failed ({_format(error)}). Training continues; later "
                     "checkpoints are uploaded too, without another warning if that fails.")
            self._has_warned = True
        shutil.rmtree(folder)

    def finish(self, folder: Path, step: int) -> None:
        """Upload the exported model of a finished run. Raises UserError if that fails; the run is saved by then."""
        if self._upload is not None:
            self._upload.join()
        try:
            self._send(folder, f"Finished at step {step}")
        except Exception as error:
            raise UserError(f"The run is finished and saved, but its upload to {self.repo} failed ({_format(error)}). "
                            f"Upload it by hand: hf upload {self.repo} {folder}") from error
        say(f"Uploaded {folder} to {self.repo}.")

    def _send(self, folder: Path, message: str) -> None:
        from huggingface_hub import HfApi

        assert self.repo is not None
        with _publishable(folder) as content:
            HfApi().upload_folder(repo_id=self.repo, folder_path=content, commit_message=message)


@contextmanager
def _publishable(folder: Path) -> Iterator[Path]:
    """Context with the model folder, or a copy of it, to publish.

    The copy has no links, which could publish files from elsewhere, and does not name a base on this machine.
    """
    file = folder / "adapter_config.json"
    config = json.loads(read_text(file)) if file.exists() else {}
    has_local_base = is_local_path(config.get("base_model_name_or_path") or "")
    private = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if _is_private(path))
    if not has_local_base and not private:
        yield folder
        return
    if links := [name for name in private if name != OWNER]:
        warn(f"{folder}: links are not uploaded ({', '.join(links)}).")
    with tempfile.TemporaryDirectory(prefix=".upload-", dir=folder.parent) as temporary:
        copy = Path(temporary) / folder.name
        shutil.copytree(folder, copy, copy_function=_link, ignore=lambda source, names: {
            name for name in names if _is_private(Path(source) / name)})
        if has_local_base:  # replaces the hard link; the original file does not change
            write_json(copy / file.name, {**config, "base_model_name_or_path": None})
        yield copy


def _is_private(path: Path) -> bool:
    return path.is_symlink() or path.name == OWNER


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)


def _format(error: Exception) -> str:
    """Return type and first line of an error, without the token that some errors quote."""
    from huggingface_hub import get_token

    return f"{type(error).__name__}: {redact(first_line(error), get_token())}"
