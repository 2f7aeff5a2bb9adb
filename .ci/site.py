"""Add to the site the pages that lie outside docs/ and the recipes that pages link to, and adapt the links."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: dict) -> Files:
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    for path in sorted((ROOT / "configs").rglob("*.yaml")):  # part of the site as they are
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Links are written for the tree of the repository; here docs/ is the root."""
    own = page.file.src_uri
    folder = (ROOT / own if own in PAGES else ROOT / "docs" / own).parent
    up = "../" * own.count("/")

    def here(link: re.Match) -> str:
        target = (folder / link[1]).resolve().relative_to(ROOT).as_posix().removeprefix("docs/")
        return f"]({up}{target}"

    return LINK.sub(here, markdown)
