"""The groups of a file that `grpo groups` has written, as rows: each with the tokens that a run has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa

from services.core.errors import ConfigurationError
from services.core.settings import Method
from services.data_server.settings import DataSettings
from services.data_server.tables import ROW, ReadTable, on_disk
from services.protocol import group_file
from services.protocol.groups import GroupFormatError
from services.protocol.prompts import Demonstration


def read_groups(path: Path, where: str, settings: DataSettings) -> ReadTable:
    """Return a function that maps a file's groups as rows; the arguments are those of ``read_json_lines``.

    Raises:
        ConfigurationError: METHOD is not sft, or `grpo groups` has not written the file.
    """
    if settings.method is not Method.SFT:
        raise ConfigurationError(f"{where} has recorded answers to learn as they are; set METHOD=sft, or give rows")
    schema = pa.schema([(ROW, pa.string())])
    try:
        head, groups = group_file.read(path)

        def batches() -> Iterator[pa.RecordBatch]:
            for group in groups:
                row = {
                    "tokenizer": head.tokenizer,
                    "prompt": group.prompt.prompt,
                    "prompt_ids": group.prompt_ids,
                    "messages": [message.model_dump() for message in group.prompt.messages],
                    "demonstrations": [
                        Demonstration(
                            completion=sequence.completion,
                            completion_ids=sequence.completion_ids.tolist(),
                            loss_mask=sequence.mask.tolist(),
                            episode=place if sequence.episode is None else sequence.episode,
                        ).model_dump()
                        for place, sequence in enumerate(group.sequences)
                    ],
                }
                yield pa.record_batch([pa.array([orjson.dumps(row).decode()], pa.string())], schema)

        return ReadTable(on_disk(batches(), schema, where), has_demonstrations=True)
    except GroupFormatError as error:
        raise ConfigurationError(f"{where}: {error}; write the file with `grpo groups RUN --out FILE`") from error
