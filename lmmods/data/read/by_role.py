"""The sources of a recipe by role, each read by one reader."""

from typing import Any, Literal

from lmmods.data.read.source_reader import SourceReader
from lmmods.recipe.source import Source, SourceLike, as_sources
from lmmods.recipe.tasks.base import DataFields

Role = Literal["train", "val", "test", "predict"]
STAGE_ROLES: dict[str | None, tuple[Role, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "val", "test", "predict"),
}


class Sources:
    """Readers of the sources of a recipe.

    Args:
        settings: Names the sources.
        text_files: How text files are read, as in `read_file`.

    Attributes:
        by_role: The sources that the recipe names.
        evaluation: Those of `data.decontaminate`, which lack `data.columns`: these are of the task's own records.
        contents: Hashes of sources by name, computed here or by the first process.
    """

    def __init__(self, settings: DataFields, text_files: str) -> None:
        self._settings, self._text_files = settings, text_files
        keys: dict[Role, tuple[str, SourceLike | None]] = {
            "train": ("source", settings.source), "val": ("val_source", settings.val_source),
            "test": ("test_source", settings.test_source), "predict": ("predict_source", settings.predict_source)}
        self.by_role: dict[Role, list[Source]] = {role: as_sources(value, key, settings.columns)
                                                  for role, (key, value) in keys.items() if value is not None}
        self.evaluation = ([] if settings.decontaminate is None
                           else as_sources(settings.decontaminate, "decontaminate"))
        self.contents: dict[str, str | None] = {}
        self._readers: dict[str, SourceReader] = {}
        self._hashed: dict[str, list[tuple[SourceReader, str | None]]] | None = None

    def key(self, role: Role) -> str:
        """Return the recipe key that the rows of a role come from."""
        names = {"train": "source", "val": "val_source" if "val" in self.by_role else "val_size"}
        return f"data.{names.get(role, f'{role}_source')}"

    def origin(self, role: Role) -> Role:
        """Return the role whose sources contain the rows of `role`."""
        if role == "val" and "val" not in self.by_role:
            return "train"
        if role == "predict" and "predict" not in self.by_role:
            # Without its own sources, predict takes test rows, else validation rows.
            return "test" if "test" in self.by_role else self.origin("val")
        return role

    def reader(self, source: Source) -> SourceReader:
        """Return the reader of a source with its content hash, computed here or by the preparing process."""
        key = repr(source)
        reader = self._readers[key] = self._readers.get(key) or SourceReader(source, self._text_files)
        # Another process has hashed the files, which may be large.
        if key in self.contents:
            reader.adopt(self.contents[key])
        else:
            self.contents[key] = reader.content
        return reader

    def stream(self, source: Source) -> SourceReader:
        """Return a reader of a source that is read during training, without a hash of all its content."""
        return SourceReader(source, self._text_files, streaming=True)

    def training_readers(self) -> list[SourceReader]:
        """Return the readers of the training sources."""
        return [self.stream(source) if self._settings.streaming else self.reader(source)
                for source in self.by_role["train"]]

    def identity(self) -> dict[str, list[str | None]]:
        """Return content hashes of the sources that determine training and validation, by key. Raises UserError."""
        return {key: [content for _, content in readers] for key, readers in self._hash().items()}

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Return manifest entries of the sources that determine training and validation, by key. Raises UserError."""
        return {key: [reader.describe() for reader, _ in readers] for key, readers in self._hash().items()}

    def _hash(self) -> dict[str, list[tuple[SourceReader, str | None]]]:
        """Return readers and content hashes by key; for streams, the hash covers sampled blocks of their files."""
        if self._hashed is None:
            streams = self.training_readers() if self._settings.streaming else None
            readers = {"source": streams or [self.reader(source) for source in self.by_role["train"]],
                       "val_source": [self.reader(source) for source in self.by_role.get("val", [])]}
            if self.evaluation:
                readers["decontaminate"] = [self.reader(source) for source in self.evaluation]
            self._hashed = {key: [(reader, reader.sampled_content() if key == "source" and streams else reader.content)
                                  for reader in key_readers] for key, key_readers in readers.items()}
        return self._hashed
