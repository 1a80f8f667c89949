"""Run docs/first_run.ipynb and write its outputs into it: ``python -m scripts.reference.notebook``."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from scripts.reference import ROOT

PATH = ROOT / "docs" / "first_run.ipynb"


def execute(notebook: nbformat.NotebookNode, directory: Path) -> None:
    """Run the cells of ``notebook`` in ``directory``, and put their outputs into it.

    Raises:
        CellExecutionError: a cell raised an error.
    """
    for cell in notebook.cells:
        cell.metadata.clear()
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=None, record_timing=False, coalesce_streams=True, resources=resources).execute()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        # Without warnings and progress bars of packages.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}


if __name__ == "__main__":
    first_run = nbformat.read(PATH, as_version=4)
    execute(first_run, ROOT)
    nbformat.write(first_run, PATH)
