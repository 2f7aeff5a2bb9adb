"""Add the pages outside docs/ and the linked recipes to the site, and adapt the links."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: dict) -> Files:
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    for path in sorted((ROOT / "configs").rglob("*.yaml")):  # published unchanged
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Change links, which are relative to the repository's files, so that docs/ is the root."""
    path = page.file.src_uri
    folder = (ROOT / path if path in PAGES else ROOT / "docs" / path).parent
    up = "../" * path.count("/")

    def convert(link: re.Match) -> str:
        target = (folder / link[1]).resolve().relative_to(ROOT).as_posix().removeprefix("docs/")
        return f"]({up}{target}"

    return LINK.sub(convert, markdown)
