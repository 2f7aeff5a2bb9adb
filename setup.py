"""What pyproject.toml cannot say: the recipes of `configs/` are part of the package when it is installed."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lmmods*", "jax_engine*"]), "lmmods.configs"],
      package_dir={"lmmods.configs": "configs"},
      package_data={"lmmods.configs": ["*.yaml", "recipes/*.yaml"], "lmmods.extras.report": ["page.*"],
                    "lmmods.recipe": ["foreign_keys.txt"]})
