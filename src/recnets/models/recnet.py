"""The RecNet family (Section 2.2): the network of the paper's architecture table, and every size of Tables 2 and 3."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from recnets.errors import RecNetsError
from recnets.layers import CRC, Recurrent, Stem
from recnets.layers.crc import check_input
from recnets.layers.recurrent import hooked
from recnets.models.registry import ModelConfig, kept_metadata, register_model
from recnets.ops import dispatch
from recnets.ops.compiler import traced
from recnets.utils import choose, did_you_mean, positive_int

CRC_OPTIONS = tuple(
    p.name for p in inspect.signature(CRC).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
)
HEADS = ("linear", "hidden")
HIDDEN_UNITS = 160


def _halves(pool: nn.Module) -> bool:
    """Is it `nn.MaxPool2d(2)`?"""
    if type(pool) is not nn.MaxPool2d:
        return False
    settings = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.return_indices, pool.ceil_mode)
    return settings == (2, 2, 0, 1, False, False)


def _sizes(values: Sequence[int], what: str) -> tuple[int, ...]:
    if isinstance(values, int | str):
        raise TypeError(f"{what} must be a sequence with an int for each stage, got {values!r}")
    return tuple(positive_int(v, f"each of {what}") for v in values)


def _check_options(options: dict[str, Any]) -> None:
    known = (*CRC_OPTIONS, "mode")
    for name in options:
        if name not in known:
            near = did_you_mean(name, [*known, "e", "s", "d", "num_classes", "in_channels", "head"])
            raise TypeError(f"a RecNet has no option {name!r}{near} (CRC options: {', '.join(known)})")


class RecNet(nn.Module):
    """RecNet(e, S_1 … S_n, d_1 … d_n): a stem, n pairs of Recurrent modules with 2×2 max pooling between, a classifier.

    Args:
        e: expansion, s_out = e · s_in in every CRC layer.
        s: S_i, channels of an input segment in the i-th pair.
        d: d_i, segments in the i-th pair.
        num_classes: outputs; 0 leaves the classifier out (forward then gives the pooled features).
        in_channels: channels of the pictures.
        head: "linear" is the paper's architecture table. "hidden" is what the paper's parameter counts imply:
            Linear(C, 160), BN, ReLU, Linear(160, num_classes), and a bias on the stem's convolution.
        squeezed: what `recnets.deploy.squeeze` left of the network; see `recnets.models.squeezed`.
        **crc_options: options of every `CRC` (kernel_x, kernel_h, nonlinearity, recurrent, padding_mode, backend)
            and `mode` of every `Recurrent`.
    """

    def __init__(
        self,
        e: int,
        s: Sequence[int],
        d: Sequence[int],
        num_classes: int = 10,
        in_channels: int = 3,
        head: str = "linear",
        squeezed: Mapping[str, Mapping[str, str]] | None = None,
        **crc_options: Any,
    ) -> None:
        super().__init__()
        self.e = positive_int(e, "e")
        self.s = _sizes(s, "s")
        self.d = _sizes(d, "d")
        if len(self.s) != len(self.d) or not self.s:
            raise ValueError(f"s and d must have the same length of at least 1, got s={self.s} and d={self.d}")
        self.head = choose(head, HEADS, "head")
        self.in_channels = positive_int(in_channels, "in_channels")
        _check_options(crc_options)
        self.crc_options = crc_options
        self.metadata: dict[str, Any] = {}  # of the weights that were loaded
        numbers = ", ".join(str(v) for v in (e, *self.s, *self.d))
        self.config = ModelConfig(f"RecNet({numbers})", num_classes, in_channels, {"head": head, **crc_options})

        widths = [s_i * d_i for s_i, d_i in zip(self.s, self.d, strict=True)]
        self.stem = Stem(in_channels, widths[0], bias=head == "hidden", backend=crc_options.get("backend", "auto"))
        self.stages = nn.ModuleList()
        for i, (s_i, d_i) in enumerate(zip(self.s, self.d, strict=True)):
            following = widths[min(i + 1, len(widths) - 1)]
            self.stages.append(
                nn.Sequential(
                    Recurrent(s_i, e * s_i, widths[i], d_i, **crc_options),
                    Recurrent(s_i, e * s_i, following, d_i, **crc_options),
                )
            )
        self.pool = nn.MaxPool2d(2)
        self.num_features = widths[-1]
        if squeezed is not None:
            from recnets.models.squeezed import shrink  # which builds on this module

            self.num_features = shrink(self, squeezed)
            self.config.overrides["squeezed"] = squeezed
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new, untrained classifier for `num_classes` classes; 0 for none. `global_pool`, as in timm, is "avg"."""
        if global_pool not in (None, "avg"):
            raise ValueError(f"RecNets average their last map: global_pool must be 'avg', got {global_pool!r}")
        self.num_classes = positive_int(num_classes, "num_classes", minimum=0)
        self.config = replace(self.config, num_classes=num_classes)
        self.metadata = kept_metadata(self.metadata)
        self.classifier: nn.Module
        if num_classes == 0:
            self.classifier = nn.Identity()
        elif self.head == "linear":
            self.classifier = nn.Linear(self.num_features, num_classes)
        else:
            self.classifier = nn.Sequential(
                nn.Linear(self.num_features, HIDDEN_UNITS),
                nn.BatchNorm1d(HIDDEN_UNITS),
                nn.ReLU(),
                nn.Linear(HIDDEN_UNITS, num_classes),
            )
        reference = self.stem.conv.weight
        self.classifier.to(reference.device, reference.dtype).train(self.training)

    def get_classifier(self) -> nn.Module:
        """The classifier, as in timm."""
        return self.classifier

    def _check(self, x: Tensor) -> None:
        check_input(x, self.in_channels, type(self).__name__)
        smallest = 2 ** (len(self.s) - 1)
        if min(x.shape[2:]) < smallest:
            raise ValueError(
                f"a RecNet of {len(self.s)} stages halves the picture {len(self.s) - 1} times and needs at least "
                f"{smallest}×{smallest} pixels, got {x.shape[2]}×{x.shape[3]}"
            )

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """(the last stage's output, [the output of every stage before pooling]), as in timm.

        `indices` chooses stages: a list of them, or an int n for the last n. With `stop_early` the stages after them
        are not run, and the output is that of the last that was. `norm` changes nothing: every stage ends with one.
        """
        choose(output_fmt, ("NCHW",), "output_fmt")
        self._check(x)
        count = len(self.stages)
        if isinstance(indices, int):
            if not 1 <= indices <= count:
                raise ValueError(f"indices as a number of stages must be 1 to {count}, got {indices}")
            wanted = list(range(count - indices, count))
        else:
            wanted = list(range(count)) if indices is None else list(indices)
        if any(not -count <= i < count for i in wanted):
            raise ValueError(f"indices must be stages of 0 to {count - 1}, got {wanted}")
        last = max((i % count for i in wanted), default=0) if stop_early else count - 1
        outputs: dict[int, Tensor] = {}
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            if i > last:
                break
            x = stage(self.pool(x) if i else x)
            outputs[i] = outputs[i - count] = x
        chosen = [outputs[i] for i in wanted]
        return chosen if intermediates_only else (x, chosen)

    def forward_features(self, x: Tensor) -> Tensor:
        """The last stage's map, (N, S_n·d_n, H/2^(n-1), W/2^(n-1))."""
        self._check(x)
        chain = self._chain(x) if dispatch.APART else None
        if chain is not None:
            return self._through(chain, x)
        x = self.stem(x)
        *before, last = self.stages
        for stage in before:
            x = self._pooled(stage, x)
        return last(x)

    def _chain(self, x: Tensor) -> list[Recurrent] | None:
        """All Recurrent modules, where kernels train them and no one would notice how maps pass between; else None."""
        if not (x.is_cuda or dispatch.INTERPRETED) or torch.compiler.is_compiling() or traced():
            return None
        if not (self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return None
        if type(self.stem) is not Stem or not _halves(self.pool):
            return None
        chain: list[Recurrent] = []
        for stage in self.stages:
            if type(stage) is not nn.Sequential or len(stage) != 2:
                return None
            chain += [module for module in stage if type(module) is Recurrent and module.passes_segments()]
        noticed = any(hooked(m) for part in (self.stem, self.stages, self.pool) for m in part.modules())
        return None if noticed or len(chain) < 2 * len(self.stages) else chain

    def _through(self, chain: list[Recurrent], x: Tensor) -> Tensor:
        """The last stage's map. Between modules each step's maps may lie apart, which makes d times as many of them."""
        count = x.shape[0]
        x = self.stem(x, following=chain[0].as_following())
        for i, module in enumerate(chain):
            following = chain[i + 1].as_following() if i + 1 < len(chain) else None
            x = module(x, pool=i % 2 == 1 and following is not None, apart=x.shape[0] != count, following=following)
        return x

    def _pooled(self, stage: nn.Module, x: Tensor) -> Tensor:
        """A stage, then pooling; where kernels may run its last module pools, unless a hook would notice."""
        if (self.training or x.is_cuda) and _halves(self.pool) and type(stage) is nn.Sequential and len(stage) == 2:
            first, second = stage
            if isinstance(second, Recurrent) and not any(
                hooked(module) for module in (stage, second, second.transition, self.pool)
            ):
                return second(first(x), pool=True)
        return self.pool(stage(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Global average pooling, then the classifier unless `pre_logits`."""
        x = dispatch.global_mean(x)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def save_pretrained(
        self,
        folder: Path | str,
        *,
        metadata: Mapping[str, Any] | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> Path:
        """Write model.safetensors, config.json and README.md (a model card) in the Hugging Face Hub's layout.

        Args:
            folder: made if it is not there.
            metadata: accuracy, normalisation, recipe and the like, as in a weights file; by default those of the
                weights that were loaded, which are no longer true after further training.
            repo_id: the repository ("user/name") that the card names.
            push_to_hub: upload to `repo_id` (by default the folder's name) as well; needs the extra "hub".
            **options: license ("apache-2.0"), overwrite_card (False: an existing README.md is kept) and dtype
                (torch.float16 stores half the bytes).
        """
        from recnets.models import hub  # which builds on this module

        folder = hub.save_pretrained(self, folder, metadata=metadata, repo_id=repo_id, **options)
        if push_to_hub:
            hub.push_to_hub(self, repo_id or folder.resolve().name, metadata=metadata, **options)
        return folder

    @classmethod
    def from_pretrained(cls, source: Path | str, *, num_classes: int | None = None, **download: Any) -> Self:
        """The RecNet, in evaluation mode, of a folder, a weights file, a published name or a repository of the Hub.

        Args:
            source: what `save_pretrained` wrote, or "user/name" (needs the extra "hub").
            num_classes: another number of classes than the weights' gets a new, untrained classifier.
            **download: of a repository: revision, cache_dir, force_download, local_files_only, token.

        The weights' metadata are in `model.metadata`.
        """
        from recnets.models import hub  # which builds on this module

        model = hub.from_pretrained(source, **download)
        if not isinstance(model, cls):
            raise RecNetsError(
                f"{source} holds a {type(model).__name__}, not a {cls.__name__}; use recnets.models.load_weights"
            )
        if num_classes is not None and num_classes != model.num_classes:
            model.reset_classifier(num_classes)
        return model

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes to the Hub (needs the extra "hub"); returns the commit's address.

        Options: private, token, branch, commit_message, and those of `save_pretrained`.
        """
        from recnets.models import hub  # which builds on this module

        return hub.push_to_hub(self, repo_id, **options)

    @property
    def depth(self) -> int:
        """Recurrent steps in all: two modules a stage (the d of RecNet-d-w)."""
        return 2 * sum(self.d)

    @property
    def width(self) -> int:
        """The widest simulated layer, e·max(S_i·d_i) (the w of RecNet-d-w)."""
        return self.e * max(s_i * d_i for s_i, d_i in zip(self.s, self.d, strict=True))


def _recnet(e: int, s: tuple[int, ...], d: tuple[int, ...], /, **kwargs: Any) -> RecNet:
    """The named network, with whatever hyper-parameters are overridden."""
    return RecNet(**{"e": e, "s": s, "d": d, **kwargs})


# Table 2, in its order.


@register_model(title="RecNet-60-640", family="recnet", paper_params="471K")
def recnet_60_640(**kwargs: Any) -> RecNet:
    return _recnet(4, (4, 8, 16), (10, 10, 10), **kwargs)


@register_model(title="RecNet-90-960", family="recnet", paper_params="863K")
def recnet_90_960(**kwargs: Any) -> RecNet:
    return _recnet(4, (4, 8, 16), (15, 15, 15), **kwargs)


@register_model(title="RecNet-120-1280", family="recnet", paper_params="1,406K")
def recnet_120_1280(**kwargs: Any) -> RecNet:
    return _recnet(4, (4, 8, 16), (20, 20, 20), **kwargs)


@register_model(title="RecNet-60-1280", family="recnet", paper_params="1,769K")
def recnet_60_1280(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 16, 32), (10, 10, 10), **kwargs)


@register_model(title="RecNet-90-1920", family="recnet", paper_params="3,306K")
def recnet_90_1920(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 16, 32), (15, 15, 15), **kwargs)


@register_model(title="RecNet-120-2560", family="recnet", paper_params="5,444K")
def recnet_120_2560(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 16, 32), (20, 20, 20), **kwargs)


@register_model(title="RecNet-60-480", family="recnet", paper_params="316K")
def recnet_60_480(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 8, 8), (5, 10, 15), **kwargs)


@register_model(title="RecNet-90-640", family="recnet", paper_params="537K")
def recnet_90_640(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 8, 8), (10, 15, 20), **kwargs)


@register_model(title="RecNet-120-960", family="recnet", paper_params="930K")
def recnet_120_960(**kwargs: Any) -> RecNet:
    return _recnet(4, (8, 8, 8), (10, 20, 30), **kwargs)


@register_model(title="RecNet-60-960", family="recnet", paper_params="1,137K")
def recnet_60_960(**kwargs: Any) -> RecNet:
    return _recnet(4, (16, 16, 16), (5, 10, 15), **kwargs)


@register_model(title="RecNet-90-1280", family="recnet", paper_params="2,028K")
def recnet_90_1280(**kwargs: Any) -> RecNet:
    return _recnet(4, (16, 16, 16), (10, 15, 20), **kwargs)


@register_model(title="RecNet-120-1920", family="recnet", paper_params="3,569K")
def recnet_120_1920(**kwargs: Any) -> RecNet:
    return _recnet(4, (16, 16, 16), (10, 20, 30), **kwargs)


# Table 3 gives these two without hyper-parameters.


@register_model(
    title="RecNet-30-60",
    family="recnet",
    paper_params="0.2M (240K)",
    note="hyper-parameters guessed: depth 30, 60 channels before expansion and the size fit",
)
def recnet_30_60(**kwargs: Any) -> RecNet:
    return _recnet(4, (12, 12, 12), (5, 5, 5), **kwargs)


@register_model(
    title="RecNet-120-2880",
    family="recnet",
    paper_params="8.2M",
    note="hyper-parameters inferred: they fit the depth, the width and the size",
)
def recnet_120_2880(**kwargs: Any) -> RecNet:
    return _recnet(4, (24, 24, 24), (10, 20, 30), **kwargs)
