"""Name the packages of the wheel, for setuptools: skypilot_grpo, and below it the folders of this repository."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "recipes", "scripts")
FOUND = find_namespace_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])

setup(packages=["skypilot_grpo", *(f"skypilot_grpo.{name}" for name in FOUND)])
