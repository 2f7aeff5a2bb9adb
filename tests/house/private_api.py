"""Find uses of private parts of libraries in our sources."""

import ast
from pathlib import Path

# Public names that start with an underscore: namedtuples, os and sys.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_current_frames"}
READERS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def find_own_names(trees: list[ast.AST]) -> set[str]:
    """Return every attribute our sources define: functions, classes, module and class variables, `self.x = `."""
    defined = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            if isinstance(node, ast.Module | ast.ClassDef):
                for item in node.body:
                    targets = getattr(item, "targets", [getattr(item, "target", None)])
                    defined |= {name.id for target in targets if target is not None
                                for name in ast.walk(target) if isinstance(name, ast.Name)}
            if (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name) and node.value.id == "self"):
                defined.add(node.attr)
    return defined


def find_private_uses(sources: dict[str, str], packages: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the private attributes and modules of libraries that each source uses.

    Args:
        sources: Text by dotted name.
        packages: Our own packages.

    Returns:
        Lines `number: code` by the name of the source.
    """
    trees = {module: ast.parse(text) for module, text in sources.items()}
    known = find_own_names(list(trees.values())) | DOCUMENTED
    uses: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if _is_use(node, known, packages):
                uses.setdefault(module, []).append(f"{node.lineno}: {ast.unparse(node)}")
    return uses


def _is_use(node: ast.AST, known: set[str], packages: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Attribute):
        return is_private(node.attr) and node.attr not in known
    if isinstance(node, ast.ImportFrom):
        return node.module.split(".")[0] not in packages and any(
            map(is_private, [*node.module.split("."), *(alias.name for alias in node.names)]))
    if isinstance(node, ast.Import):
        return any(is_private(part) for alias in node.names for part in alias.name.split("."))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READERS:
        name = getattr(node.args[1], "value", None)
        return isinstance(name, str) and is_private(name) and name not in known
    # A patched library: `library.function = ours`.
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Attribute) and _is_library(target.value, packages) for target in node.targets)


def _is_library(node: ast.AST, packages: tuple[str, ...]) -> bool:
    """Whether an expression starts with a library module under its usual name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in {
        "lightning", "L", "torch", "transformers", "peft", "bitsandbytes", "bnb", "deepspeed", "jax", "jnp",
        "flax", "nnx", "optax", "datasets", "tokenizers", "wandb", "jinja2", "fsspec", "np"}


def main() -> None:
    """List all uses, compat modules included."""
    root = Path(__file__).parents[2]
    sources = {str(path.relative_to(root)): path.read_text() for package in ("lmmods", "jax_engine")
               for path in sorted((root / package).rglob("*.py"))}
    for name, lines in find_private_uses(sources, ("lmmods", "jax_engine")).items():
        print(*(f"{name}:{line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
