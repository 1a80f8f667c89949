"""Name the packages of the wheel, for setuptools: skypilot_grpo, and below it the folders of this repository."""

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "recipes", "scripts", "toys")
DATA = ("jobgroups", "examples")
"""Folders whose files pyproject.toml names."""
FOUND = find_namespace_packages(
    include=[pattern for folder in (*FOLDERS, *DATA) for pattern in (folder, f"{folder}.*")]
)


class Build(build_py):
    """A build without the modules of the root and of DATA, which are somebody's own."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return name, module and file of the modules of a package."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        is_without = package in ("skypilot_grpo", *(f"skypilot_grpo.{folder}" for folder in DATA))
        return [one for one in found if not is_without or one[1] == "__init__"]


setup(packages=["skypilot_grpo", *(f"skypilot_grpo.{name}" for name in FOUND)], cmdclass={"build_py": Build})
