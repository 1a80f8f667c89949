"""Files of rows for datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a .jsonl or .parquet file, whose folder is made where it is missing, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
