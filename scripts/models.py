"""``grpo merge-adapter`` and ``grpo push``: LoRA adapters merged into their model, and a run's model on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.core.errors import ConfigurationError
from services.run_page.directory import RUNS, find_run
from services.weights.policy_store import CONFIG_FILE, is_adapter
from trainer.reporting.model_card import write_card


def merge_adapter(
    adapter: Annotated[Path, typer.Argument(help="directory of the adapters, such as runs/grpo-1/policy/v000012")],
    directory: Annotated[Path, typer.Argument(help="directory to write the model to")],
) -> None:
    """Merge LoRA adapters into their model.

    The model is the one that ``adapter_config.json`` names, in float32, with its tokenizer.
    """
    if not is_adapter(adapter):
        raise typer.BadParameter(f"{adapter} has no {CONFIG_FILE}", param_hint="ADAPTER")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(name).save_pretrained(directory)


def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run that has ended, by id or directory.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The model's repository, made if need be.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    below: Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")] = RUNS,
) -> None:
    """Upload a run's model, with a model card made from the run, to the Hugging Face hub.

    The token is HF_TOKEN, or that of `hf auth login`. The files become one commit, so the repository never has half a
    model. After an interruption the same command uploads only the files that the hub lacks.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    run_dir = find_run(run, below).path
    model = run_dir / "model"
    if not any(model.glob("*.safetensors")):
        raise ConfigurationError(f"{run_dir} has no trained model; the run writes it when it ends (grpo status {run})")
    card = write_card(run_dir)
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=url.repo_id, folder_path=model, commit_message=f"The model of run {run_dir.name}"
        )
    except HFValidationError as error:
        raise ConfigurationError(f"{repository!r} is no name of a repository, such as org/name: {error}") from error
    except LocalTokenNotFoundError as error:
        raise ConfigurationError("no token of the hub; set HF_TOKEN, or run `hf auth login`") from error
    # The hub's client raises RuntimeError where the upload of a single file fails.
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:
        reason = getattr(error, "server_message", None) or error
        raise ConfigurationError(
            f"{api.endpoint} did not take {repository}: {reason}. Nothing of it is committed; check the network and "
            "the token's rights (HF_TOKEN), and give the command again"
        ) from error
    typer.echo(f"{card.parent} -> {done.commit_url}")
