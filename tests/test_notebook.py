"""docs/first_run.ipynb runs, and is committed with its outputs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs/first_run.ipynb"


def images(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" for output in outputs)
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs_from_its_directory(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkout after `make demo`, but with the tiny model instead of the demo's."""
    checkout = tmp_path / "skypilot_grpo"
    (checkout / ".cache/models").mkdir(parents=True)
    (checkout / ".cache/models/smollm2-135m").symlink_to(tiny_model)
    for entry in ("__init__.py", "local_runner", "docs"):
        (checkout / entry).symlink_to(ROOT / entry)
    # In place of the editable installation.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    notebook = nbformat.read(PATH, as_version=4)
    [questions] = [cell for cell in notebook.cells if cell.source.startswith("rows = ")]
    # What the tiny model can read.
    questions.source = re.sub(r'f".*?="', 'f"{a}+{b}="', questions.source)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(checkout / "docs")}}).execute()
    assert images(notebook)
    [run] = checkout.glob("runs/*")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
