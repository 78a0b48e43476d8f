"""The model card of a RecNet: what it is, what it reaches, how it was trained, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recnets.models.profile import profile

if TYPE_CHECKING:
    from recnets.models.recnet import RecNet

PAPER = "https://doi.org/10.5244/C.33.214"
TAGS = ("image-classification", "pytorch", "recnets")


def model_card(model: RecNet, metadata: Mapping[str, Any], *, license: str, source: str) -> str:
    """The text of README.md: the Hub's YAML header, then Markdown. Says only what the metadata say.

    `source` is what `from_pretrained` takes: the repository, or the folder.
    """
    title = _title(model)
    parts = [
        f"---\n{_header(title, metadata, license)}---\n",
        f"# {title}\n",
        f"A RecNet, a compact image classifier that runs a small recurrent network across its channels "
        f"([Retsinas et al., BMVC 2019]({PAPER})).\n",
        _facts(model, metadata),
        "## Use\n",
        "```python\nimport torch\n\nfrom recnets import RecNet\n\n"
        f'model = RecNet.from_pretrained("{source}")\n{_example(model, metadata)}```\n',
        *_normalisation(metadata),
        *_training(metadata),
        f"## Licence\n\n{license}\n",
    ]
    return "\n".join(parts)


def _title(model: RecNet) -> str:
    from recnets.models.registry import list_models, model_info

    name = model.config.name
    title = model_info(name).title if name in list_models() else name
    return f"{title}, squeezed" if "squeezed" in model.config.overrides else title


def _dataset(metadata: Mapping[str, Any]) -> str | None:
    """The data set without the folders above it, which concern nobody else."""
    name = metadata.get("dataset")
    return None if name is None else str(name).removeprefix("folder:").rstrip("/").rsplit("/", 1)[-1]


def _header(title: str, metadata: Mapping[str, Any], license: str) -> str:
    """YAML, whose values are written as JSON, which is YAML too."""
    dataset, accuracy = _dataset(metadata), metadata.get("accuracy")
    entries: dict[str, Any] = {"library_name": "recnets", "license": license}
    entries |= {"pipeline_tag": "image-classification", "tags": list(TAGS)}
    if dataset is not None and not str(metadata["dataset"]).startswith("folder:"):
        entries["datasets"] = [dataset]
    if accuracy is not None:
        entries["metrics"] = ["accuracy"]
    if accuracy is not None and dataset is not None:
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"type": dataset, "name": dataset, "split": "test"},
            "metrics": [{"type": "accuracy", "value": accuracy, "name": "top-1 accuracy in percent"}],
        }
        entries["model-index"] = [{"name": title, "results": [result]}]
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in entries.items())


def _size(metadata: Mapping[str, Any]) -> tuple[int, int]:
    known = metadata.get("image_size")
    return (int(known[0]), int(known[1])) if isinstance(known, list | tuple) else (32, 32)


def _facts(model: RecNet, metadata: Mapping[str, Any]) -> str:
    height, width = _size(metadata)
    numbers = ", ".join(str(v) for v in (model.e, *model.s, *model.d))
    rows = {
        "architecture": f"RecNet({numbers}), {model.head} head",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "multiply-adds": f"{profile(model, image_size=(height, width)).macs:,} for a picture of {height}×{width}",
        "data": _dataset(metadata),
        "accuracy": None if "accuracy" not in metadata else f"{metadata['accuracy']:.2f} % of the test set (top-1)",
        "classes": None if "classes" not in metadata else ", ".join(str(c) for c in metadata["classes"]),
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    return "\n".join(["| | |", "| --- | --- |", *lines, ""])


def _example(model: RecNet, metadata: Mapping[str, Any]) -> str:
    height, width = _size(metadata)
    picture = f"torch.rand(1, {model.in_channels}, {height}, {width})"
    known = metadata.get("normalisation")
    if not known:
        return f"logits = model({picture})\n"
    vectors = (f"{key} = torch.tensor({list(known[key])}).view(-1, 1, 1)\n" for key in ("mean", "std"))
    return f"pictures = {picture}  # in 0 … 1\n{''.join(vectors)}logits = model((pictures - mean) / std)\n"


def _normalisation(metadata: Mapping[str, Any]) -> list[str]:
    known = metadata.get("normalisation")
    if not known:
        return []
    rows = "".join(f"| {key} | {', '.join(str(v) for v in known[key])} |\n" for key in ("mean", "std"))
    text = "Pictures in 0 … 1, minus the mean and divided by the standard deviation of each channel:"
    return [f"## Normalisation\n\n{text}\n\n| | |\n| --- | --- |\n{rows}"]


def _training(metadata: Mapping[str, Any]) -> list[str]:
    """The recipe, the command and what else makes the training repeatable."""
    rows = {key: metadata.get(key) for key in ("epoch", "seed", "commit", "commits")}
    rows |= {key: value for key, value in (metadata.get("versions") or {}).items() if key in ("python", "torch")}
    known = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    recipe, command = metadata.get("recipe"), metadata.get("command")
    parts = ["## Training\n"] if known or recipe or command else []
    if command:
        parts.append(f"```bash\n{command}\n```\n")
    if known:
        parts.append("\n".join(["| | |", "| --- | --- |", *known, ""]))
    if recipe:
        lines = (f"{key} = {json.dumps(value)}" for key, value in recipe.items() if value is not None)
        parts.append("The whole recipe:\n\n```\n" + "\n".join(lines) + "\n```\n")
    return parts
