"""The data files that a path, folder, glob or URL stands for.

Nothing but regular files is ever opened: a pipe would be waited for, and a device read without end. Nothing that could
hold rows is passed over in silence: what looks like a data file and is none is refused by its name.
"""

import difflib
import glob
import os
from collections.abc import Iterator

import fsspec

from lmmods.core import hub
from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.sources.paths import CODECS, check_regular, file_type
from lmmods.data.sources.readers import READERS

# Of datasets' save_to_disk.
BOOKKEEPING = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
READABLE = f"readable are {', '.join(sorted(READERS))} and .gz of these"


def find_files(named: str) -> list[str]:
    """Sorted data files of a local path, folder, glob or URL; empty when the path can only name a hub data set.

    Raises:
        UserError: Nothing readable is there.
    """
    path = os.path.expanduser(named)
    if "://" in path:
        local = _local_path(path)
        if local is None:
            return _find_remote(path)
        path = local
    if os.path.isdir(path):
        return _files_in_folder(path)
    if os.path.lexists(path):
        check_regular(path)
        return [path]
    if glob.has_magic(path):
        files = sorted({name for name in _glob(path) if not os.path.isdir(name)})
        if not files:
            raise UserError(f"{named}: no file matches this pattern (working directory {os.getcwd()})")
        for name in files:
            check_regular(name)
        return files
    if hub.HUB_ID.fullmatch(path) and not _looks_like_file(path):
        return []
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise UserError(f"{named}: no such file or folder (working directory {os.getcwd()}){did_you_mean(name, names)}")


def did_you_mean(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _looks_like_file(path: str) -> bool:
    return file_type(path) in READERS or path.endswith(tuple(CODECS)) or path.startswith((".", "/"))


def _is_data(name: str) -> bool:
    return not name.startswith(".") and name not in BOOKKEEPING and file_type(name) in READERS


def _files_in_folder(folder: str) -> list[str]:
    found = [os.path.join(here, name) for here, names in _walk(folder) for name in names if _is_data(name)]
    if not found:
        raise UserError(f"{folder}: no readable file in this folder; {READABLE}")
    for path in found:
        check_regular(path)
    return sorted(found)


def _walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, each with the names of what is no folder; hidden ones are left out.

    Links to folders are followed, after all others, and each folder is met once: so a loop of links ends, and a folder
    that a link leads to a second time is not read twice.
    """
    met: set[tuple[int, int]] = set()
    waiting, links = [folder], []
    while waiting or links:
        here = waiting.pop(0) if waiting else links.pop(0)
        try:
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in met:
                continue
            met.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(here))
        except OSError as error:
            raise UserError(f"{here}: this folder cannot be read ({error}); mend its rights, or name files") from error
        folders = [name for name in names if os.path.isdir(os.path.join(here, name))]
        for name in folders:
            path = os.path.join(here, name)
            if not name.startswith("."):
                (links if os.path.islink(path) else waiting).append(path)
        yield here, [name for name in names if name not in set(folders)]


def _glob(pattern: str) -> Iterator[str]:
    """Like the standard library's, but `**` meets each folder once, however links may lead around."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index("**")
    head, tail = "/".join(parts[:place]), "/".join(parts[place + 1 :]) or "*"
    roots = glob.glob(head) if head else ["/" if pattern.startswith("/") else "."]
    for root in filter(os.path.isdir, roots):
        for folder, _ in _walk(root):
            inside = "" if folder == "." else folder.removeprefix("./")
            yield from _glob(os.path.join(glob.escape(inside), tail))


def _local_path(url: str) -> str | None:
    """The path that a file:// URL stands for; None for other URLs, whose local parts are checked."""
    for part in url.split("::")[1:]:
        local = _local_path(part) if "://" in part else part
        if local is not None and os.path.lexists(local):
            check_regular(local)
    scheme, _, rest = url.partition("://")
    if scheme not in ("file", "local"):
        return None
    if not rest:
        raise UserError(f"{url}: this URL names no file")
    return fsspec.url_to_fs(url)[1]


def _find_remote(url: str) -> list[str]:
    first, chained, rest = url.partition("::")
    before, behind = ("", chained + rest) if "://" in first else (first + chained, "")
    if "hf://" in url:
        hub.check_answers(url)
    try:
        filesystem, path = fsspec.url_to_fs(url)
        if glob.has_magic(path):
            names = filesystem.glob(path)
        elif filesystem.isdir(path):
            names = [name for name in filesystem.find(path) if _is_data(name.rsplit("/", 1)[-1])]
        else:
            return [url]
    except Exception as error:  # each file system raises kinds of its own, all of them about this URL
        raise UserError(f"{url}: cannot be opened ({type(error).__name__}: {redact(str(error))[:300]})") from error
    if not names:
        raise UserError(f"{url}: no readable file there; {READABLE}")
    return sorted(before + filesystem.unstrip_protocol(name) + behind for name in names)
