"""Models in the Hugging Face Hub's layout: a folder of model.safetensors, config.json and README.md (the model card).

The layout and the methods are those of `huggingface_hub.PyTorchModelHubMixin`: a subclass that mixes it in reads the
same folders. Folders need no extra; repositories need the extra "hub". The weights file is an ordinary one of this
package, so whatever takes weights takes such a folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recnets.errors import RecNetsError
from recnets.models.card import model_card
from recnets.models.weights import HUB_WEIGHTS, MACHINE_OVERRIDES, check_classes, load_weights, published, save_weights
from recnets.utils import atomic_write, require

if TYPE_CHECKING:
    from recnets.models.recnet import RecNet

CONFIG, CARD = "config.json", "README.md"


def hub_config(model: RecNet) -> dict[str, Any]:
    """The arguments that build this RecNet again, and nothing else: the mixin passes all of them to the class."""
    options = {k: v for k, v in model.crc_options.items() if k not in MACHINE_OVERRIDES}
    config = {"e": model.e, "s": model.s, "d": model.d, "num_classes": model.num_classes}
    config |= {"in_channels": model.in_channels, "head": model.head, **options}
    squeezed = model.config.overrides.get("squeezed")
    return config if squeezed is None else {**config, "squeezed": squeezed}


def save_pretrained(
    model: RecNet,
    folder: Path | str,
    *,
    metadata: Mapping[str, Any] | None = None,
    license: str = "apache-2.0",
    repo_id: str | None = None,
    overwrite_card: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the three files; see `RecNet.save_pretrained`."""
    folder = Path(folder).expanduser()
    about = dict(model.metadata if metadata is None else metadata)
    check_classes(model.num_classes, about)  # before a folder is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecNetsError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    save_weights(folder / HUB_WEIGHTS, model, about, dtype=dtype)
    atomic_write(folder / CONFIG, json.dumps(hub_config(model), indent=2) + "\n")
    if overwrite_card or not (folder / CARD).exists():
        atomic_write(folder / CARD, model_card(model, about, license=license, source=repo_id or folder.resolve().name))
    return folder


def from_pretrained(
    source: Path | str,
    *,
    revision: str | None = None,
    cache_dir: Path | str | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> torch.nn.Module:
    """The model of a folder, a weights file, a published name or a repository; see `RecNet.from_pretrained`."""
    if Path(source).expanduser().exists() or str(source) in published():
        return load_weights(source)[0]
    options = {"revision": revision, "cache_dir": cache_dir, "force_download": force_download}
    return load_weights(_download(str(source), {**options, "local_files_only": local_files_only, "token": token}))[0]


def _download(repo_id: str, options: Mapping[str, Any]) -> Path:
    """The path of a repository's weights in the Hub's cache."""
    nothing = f"{repo_id!r} is neither a folder with {HUB_WEIGHTS} nor a published name"
    try:
        hub = require("huggingface_hub", "hub")
    except RecNetsError as error:
        raise RecNetsError(f"{nothing}; to look for a repository of that name, {error}") from error
    errors, constants = (require(f"huggingface_hub.{name}", "hub") for name in ("errors", "constants"))
    try:
        return Path(hub.hf_hub_download(repo_id=repo_id, filename=HUB_WEIGHTS, **options))
    except errors.HFValidationError as error:
        raise RecNetsError(f"{nothing}, and no repository can have that name: {_first_line(error)}") from error
    except (OSError, errors.EntryNotFoundError) as error:  # the Hub's own errors, and those of the network
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise RecNetsError(
            f"{nothing}, and {HUB_WEIGHTS} of a repository of that name is not to be had{offline}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def push_to_hub(
    model: RecNet,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    commit_message: str = "Upload a RecNet",
    **save_options: Any,
) -> str:
    """Upload the three files as one commit and return its address; see `RecNet.push_to_hub`."""
    hub = require("huggingface_hub", "hub")
    api = hub.HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, folder, repo_id=repo_id, **save_options)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=branch
            )
    except (OSError, require("huggingface_hub.errors", "hub").HFValidationError) as error:
        raise RecNetsError(f"cannot upload to the repository {repo_id!r}: {_first_line(error)}") from error
    return str(commit)
