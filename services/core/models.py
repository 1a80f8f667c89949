"""Models by name or directory, for programs that do not load them: download, files, vocabulary and context length.

``download_model`` fills the Hugging Face cache by one process for all nodes that share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from filelock import SoftFileLease, Timeout
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import disable_progress_bars

from services.core.errors import ConfigurationError, DependencyLostError, first_line
from services.core.files import check_model, check_model_directory
from services.core.logs import get_logger

log = get_logger(__name__)


LEASE_SECONDS = 120.0
"""The time after which another node takes over from a killed downloader. NFS shows other nodes a file's new time after
up to 60 s."""
REPORT_SECONDS = 30.0
"""The time between two lines of the log of a process that waits for another one's download."""
POLL_SECONDS = 1.0
LOOK_SECONDS = 10.0
"""Longest time for the answer whether the hub has a dataset."""
READ_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
"""The files of a model that trainer and engines read."""
UNREAD_FILES = ["original/*", "consolidated*"]
"""The same weights in the formats of other programs."""
COMPLETE = ".complete"
"""Marks a model's directory in the cache as complete."""


def download_model(model: str) -> None:
    """Wait until the cache has the whole model; download it unless another process does.

    A directory needs no download. A model that is complete in the cache is used as it is, even if the hub has a newer
    one. One process downloads while it keeps a lease, a file in the cache that it refreshes. If it is killed, another
    process downloads the files that are not complete.

    Returns if the hub does not list the model; the program that loads it then reports the error.

    Args:
        model: a name on the hub, or a directory.

    Raises:
        ConfigurationError: the directory does not exist, or the cache cannot be written.
        DependencyLostError: a download broke off.
    """
    check_model_directory(model)
    if Path(model).expanduser().is_dir() or constants.is_offline_mode():
        return
    try:
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
    except HFValidationError:
        return
    if (folder / COMPLETE).exists():
        return
    with _leased(folder.parent / ".locks" / f"{folder.name}.lease", model):
        if not (folder / COMPLETE).exists():
            _download(model, folder)


def model_files(model: str, *, with_weights: bool) -> Path:
    """Return a directory with a model's files: of a name on the hub, those without weights may be downloaded alone.

    Raises:
        ConfigurationError: there is no such directory, and neither the hub nor its cache has such a model.
    """
    check_model(model)
    if (directory := Path(model).expanduser()).is_dir():
        return directory
    try:
        ignored = [*UNREAD_FILES, *([] if with_weights else ["*.safetensors", "*.safetensors.index.json"])]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=READ_FILES, ignore_patterns=ignored))
    except Exception as error:  # its own errors, those of its HTTP library, and OSError
        raise ConfigurationError(
            f"MODEL_NAME={model}: neither the hub nor its cache gives its files ({first_line(error)}); check the name "
            "and the network, or give a directory with its config.json and tokenizer"
        ) from error


def is_dataset_listed(name: str) -> bool:
    """Return whether the hub has a dataset; False if the hub does not answer.

    Raises:
        ConfigurationError: the hub answers that it has no dataset of that name.
    """
    try:
        huggingface_hub.HfApi().repo_info(name, repo_type="dataset", timeout=LOOK_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigurationError(
            f"DATASET={name}: the Hugging Face hub has no such dataset, or it is private; check the name, give "
            "--secret HF_TOKEN, or give a path"
        ) from error
    except Exception:  # noqa: BLE001  # its own errors, those of its HTTP library, and OSError
        return False
    return True


@contextmanager
def _leased(path: Path, model: str) -> Iterator[None]:
    # Not the hub's own locks: on volumes without working flock every node gets them.
    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                lease.acquire(timeout=REPORT_SECONDS, poll_interval=POLL_SECONDS)
                break
            except Timeout:
                log.info("waiting for the model: another process downloads it", model=model, cache=str(path.parents[1]))
    except OSError as error:
        raise ConfigurationError(
            f"MODEL_NAME={model}: the cache {path.parents[1]} cannot be written: {first_line(error)}; set HF_HUB_CACHE "
            "to a directory that can, or HF_HUB_OFFLINE=1 if it has the model"
        ) from error
    try:
        yield
    finally:
        lease.release()


def _download(model: str, folder: Path) -> None:
    disable_progress_bars()
    try:
        files = huggingface_hub.snapshot_download(
            model, allow_patterns=READ_FILES, ignore_patterns=UNREAD_FILES, dry_run=True
        )
    except Exception as error:  # noqa: BLE001  # its own errors, those of its HTTP library, and OSError
        log.warning("the hub does not list the model's files", model=model, reason=first_line(error))
        return
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    if missing:
        log.info("downloading the model", model=model, gigabytes=missing / 1e9, cache=str(folder.parent))
    try:
        huggingface_hub.snapshot_download(model, allow_patterns=READ_FILES, ignore_patterns=UNREAD_FILES)
        (folder / COMPLETE).touch()
    except Exception as error:
        raise DependencyLostError(
            f"MODEL_NAME={model}: the download to {folder} broke off: {first_line(error)}; a restart downloads the "
            "missing files"
        ) from error
    if missing:
        log.info("downloaded the model", model=model)


def vocabulary_size(model: str, named_by: str) -> int:
    """Return the vocabulary size from a model's config.json, without the seconds that importing transformers takes.

    Args:
        model: a Hugging Face name or a directory.
        named_by: the setting or option that names the model, for the error.

    Raises:
        ConfigurationError: the file cannot be read, or has no vocabulary size.
    """
    return _configured(model, named_by, "vocab_size")


def context_length(model: str, named_by: str) -> int:
    """Return the longest prompt and completion together, in tokens; see ``vocabulary_size``."""
    return _configured(model, named_by, "max_position_embeddings")


def model_file(model: str, name: str) -> Path:
    """Return the path of a file of a model: in its directory, or in the hub's cache, where it is downloaded.

    Raises:
        OSError, ValueError: the hub does not give it.
    """
    directory = Path(model).expanduser()
    return directory / name if directory.is_dir() else Path(huggingface_hub.hf_hub_download(model, name))


def _configured(model: str, named_by: str, field: str) -> int:
    try:
        config: dict[str, Any] = json.loads(model_file(model, "config.json").read_text("utf-8"))
        # Multimodal models have a configuration for each modality.
        return int((config | (config.get("text_config") or {}))[field])
    except KeyError:
        reason = f"its config.json has no {field}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"its configuration cannot be loaded: {first_line(error)}"
    raise ConfigurationError(f"{named_by} {model!r}: {reason}; give a Hugging Face name or directory")


def attention_option(config: Any) -> dict[str, str]:
    """Return the option that names a configuration's attention by transformers; none where it is the default.

    The default is eager for models with sinks, and otherwise leaves out caps of scores (Gemma 2).
    """
    has_caps = getattr(config, "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if has_caps else {}
