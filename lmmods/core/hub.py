"""The Hugging Face hub: form of its names, reachability, and messages if it lacks something."""

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lmmods.core import compat
from lmmods.core.console import warn
from lmmods.core.errors import UserError, first_line
from lmmods.core.redaction import redact

Kind = Literal["model", "dataset"]
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*|[\w-][\w.-]*")  # owner/name, and old names without an owner
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
SECONDS = 5.0  # timeout after which the hub counts as unreachable; $HF_HUB_ETAG_TIMEOUT overrides it
NETWORK = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")  # packages whose errors are network errors


@contextmanager
def loading(key: str, name: str, kind: Kind = "model", revision: str | None = None,
            missing: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Wrap the loading of `name` by a library: a local folder or file, or else from the hub or its cache.

    Once per process it first checks whether the hub answers. If not, libraries work offline from then on: they use the
    cache at once, instead of six attempts for each file.

    Args:
        key: Recipe key or option that has the name.
        missing: Exceptions of the library for a missing file.

    Raises:
        UserError: The hub has no such name, or does not answer and its cache lacks what is needed.
    """
    if os.path.exists(name):
        try:
            yield
        except ValueError as error:
            from huggingface_hub.errors import HFValidationError

            if not isinstance(error, HFValidationError):  # raised by libraries that mistake a file's path for an id
                raise
            raise UserError(f"{key}: {name} is a file. Use its folder, or a hub id.") from error
        return
    _check_name(key, name)
    hub_problem = unreachable_reason()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if reason := _rejection_reason(error, name, kind, revision):
            raise UserError(f"{key}: there is no folder {name!r}, and the hub rejects it as an id: {reason}."
                            ) from error
        if isinstance(error, missing) if hub_problem else _is_network_error(error):
            problem = hub_problem or _describe_failure(_innermost(error))
            raise _unreachable_error(key, name, kind, revision, problem, error) from error
        raise
    if hub_problem:
        _warn_once(hub_problem)


def check_answers(name: str) -> None:
    """Raise UserError if the hub does not answer: a file that `name` (hf://) addresses is never cached."""
    from huggingface_hub import constants

    if hub_problem := unreachable_reason():
        raise UserError(f"{name}: the hub ({redact(constants.ENDPOINT)}) {hub_problem}. Download the file where there "
                        "is network access (hf download) and use its path.")


def offline_by() -> str | None:
    """Return the environment variable by which the user has disabled access to the hub."""
    return next((name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def _ask_hub(seconds: float) -> str:
    """Return the reason why the hub does not answer, tested with its own library; empty if it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def ask() -> str:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=seconds).status_code
        except Exception as error:  # of its HTTP library, which differs between releases
            return _innermost(error)
        return f"it answers with status {status}" if status >= 500 else ""

    return ask_with_timeout(ask, seconds)


def ask_with_timeout(ask: Callable[[], str], seconds: float) -> str:
    """Run `ask` in a thread, since resolving a name can hang; return the problem that it reports, or a timeout, or "".
    """
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[0] if problems else f"no answer within {seconds:g} seconds"


@functools.cache
def unreachable_reason() -> str:
    """Return in words why the hub does not answer; empty if it does."""
    if variable := offline_by():
        return f"is not asked, as {variable} is set"
    problem = _ask_hub(float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS))
    if not problem:
        return ""
    compat.work_offline()
    return _describe_failure(problem)


def _describe_failure(reason: str) -> str:
    return f"cannot be reached ({reason})"


@functools.cache
def _warn_once(hub_problem: str) -> None:
    from huggingface_hub import constants

    if not hub_problem.startswith("is not asked"):  # the user has set this
        warn(f"The hub ({redact(constants.ENDPOINT)}) {hub_problem}; using cached files.")


def _check_name(key: str, name: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{key}: there is no folder {name!r}, and a hub id has the form owner/name. Use a folder (the "
                        f"working directory is {os.getcwd()}), or an id.") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _innermost(error: BaseException) -> str:
    """Return the message of the innermost cause, which is most specific, without the system's error number."""
    *_, last = _chain(error)
    return re.sub(r"^\[Errno -?\d+\] ", "", first_line(last)) or type(last).__name__


def _is_network_error(error: BaseException) -> bool:
    return any(type(cause).__module__.split(".")[0] in NETWORK or isinstance(cause, ConnectionError | TimeoutError)
               for cause in _chain(error))


def _rejection_reason(error: BaseException, name: str, kind: Kind, revision: str | None) -> str:
    """Return the reason why the hub rejects a name; empty if it does not."""
    from huggingface_hub import constants, errors

    page = redact(f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}")
    reasons = {errors.GatedRepoError: f"it is gated. Accept its terms at {page}, then run hf auth login",
               errors.RepositoryNotFoundError: f"it has no {kind} of this name, or a private one (hf auth login)",
               errors.RevisionNotFoundError: f"this {kind} has no revision {revision!r}"}
    return next((reason for cause in _chain(error) for cls, reason in reasons.items() if isinstance(cause, cls)), "")


def _unreachable_error(key: str, name: str, kind: Kind, revision: str | None, hub_problem: str, error: Exception
                       ) -> UserError:
    """Build the error for a name that neither the hub nor its cache provides."""
    from huggingface_hub import constants

    root, cached = _find_cached(name, kind, revision)
    has_details = not any(type(cause).__module__.startswith("huggingface_hub") for cause in _chain(error))
    cached = f"{cached}, which is not enough" if cached else "nothing"
    cached += f" ({redact(first_line(error))})" if cached != "nothing" and has_details else ""
    fetch = "run inspect" if kind == "dataset" else f"run hf download {name}" + (
        f" --revision {revision}" if revision else "")
    return UserError(
        f"{key}: there is no folder {name!r}, and the hub ({redact(constants.ENDPOINT)}) {hub_problem}. For "
        f"this id, the cache {root} has {cached}. Use a local folder; or {fetch} where there is a network, share the "
        "cache ($HF_HOME), and set HF_HUB_OFFLINE=1 to skip the hub.")


def _find_cached(name: str, kind: Kind, revision: str | None) -> tuple[Path, str]:
    """Return the cache that a library uses, and a description of a repository's files there."""
    from huggingface_hub import constants

    if kind == "dataset":
        root, folder = compat.cached_as(name)
        return root, _join_names(path.name for path in (root / folder).glob("*"))
    root = Path(constants.HF_HUB_CACHE)
    repository = root / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = repository / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision or "main")
    files = _join_names(str(path.relative_to(commit)) for path in commit.rglob("*") if path.is_file())
    revisions = _join_names(path.name for path in repository.glob("snapshots/*"))
    return root, files or revisions and f"other revisions ({revisions})"


def _join_names(names: Iterator[str], limit: int = 8) -> str:
    shown = sorted(names)
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")
