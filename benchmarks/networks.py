"""``python -m benchmarks networks``: networks of other packages at O1, O2 and O3, compared with ``bf16-mixed``.

Each network is small, has random weights, and overfits one batch in float32, with Lightning's ``bf16-mixed`` and at
each level. The table shows the last loss in per cent of that in float32. Its remarks say where a run failed or warned,
left hooks or half tensors in the module, or made a pickle that names this package or, below O3, a half copy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.training import LightningModule, Trainer
from lightning_turbo import ApexAMP
from lightning_turbo.errors import TurboWarning
from lightning_turbo.measure import describe_machine, markdown_table, print_lines

__all__ = ["NETWORKS", "Network", "main", "train"]

STEPS = 8
WAYS = ("float32", "bf16-mixed", "O1", "O2", "O3")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


class Network(NamedTuple):
    """A network of another package, with its batch and its loss."""

    package: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    rate: float = 1e-3  # learning rate of Adam


def _of(path: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that calls the class or function at a dotted path."""
    module, _, name = path.rpartition(".")
    return lambda: getattr(importlib.import_module(module), name)(**settings)


def _hugging(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        return getattr(transformers, kind)(getattr(transformers, config)(**settings))

    return make


def _images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _regress(net: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean squared distance to one constant per channel."""
    output = _first(net(batch)).float()
    goal = torch.linspace(-1, 1, output.shape[1]).reshape(-1, *[1] * (output.ndim - 2))
    return (output - goal).square().mean()


def _denoise(net: nn.Module, batch: Tensor) -> Tensor:
    return (net(batch, torch.tensor([3, 700])).float() - batch).square().mean()


def _register(net: nn.Module, batch: Tensor) -> Tensor:
    warped, field = net(batch[:, :1], batch[:, 1:])
    return (warped.float() - batch[:, 1:]).square().mean() + 0.01 * field.float().square().mean()


def _quantize(net: nn.Module, batch: Tensor) -> Tensor:
    output, commitment = net(batch)
    return (output.float() - batch).square().mean() + commitment.float()


def _detect(net: nn.Module, batch: Tensor) -> Tensor:
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    losses = net(list(batch), [target] * len(batch))
    return torch.stack([loss.float() for loss in losses.values()]).sum()


def _flow(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch, batch.roll(3, -1), num_flow_updates=2)[-1].float().sub(3.0).abs().mean()


def _words(net: Any, ids: Tensor) -> Tensor:
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if net.config.is_encoder_decoder else {})}
    return nn.functional.cross_entropy(net(**inputs).logits.float().flatten(0, 1), ids.flatten())


def _token_ids() -> Tensor:
    return torch.randint(0, 96, (2, 48))


_SPATIAL = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_MONAI = "monai.networks.nets."
_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DETECTION = {"weights": None, "weights_backbone": None, "num_classes": 3, "min_size": 64, "max_size": 64}

NETWORKS = {
    "UNet": Network(
        "monai",
        _of(_MONAI + "UNet", **_SPATIAL, channels=(4, 8, 16), strides=(2, 2)),
        _images(2, 1, 16, 16, 16),
        _regress,
    ),
    # Three levels: in a fourth, whose inputs are 2 deep, the weight gradient of oneDNN is wrong, see ``_head``.
    "SegResNet": Network(
        "monai",
        _of(_MONAI + "SegResNet", **_SPATIAL, init_filters=8, blocks_down=(1, 2, 2), blocks_up=(1, 1)),
        _images(1, 1, 16, 16, 16),
        _regress,
    ),
    "DynUNet": Network(
        "monai",
        _of(
            _MONAI + "DynUNet",
            **_SPATIAL,
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[4, 8, 16],
        ),
        _images(2, 1, 16, 16, 16),
        _regress,
    ),
    "AttentionUnet": Network(
        "monai",
        _of(_MONAI + "AttentionUnet", **_SPATIAL, channels=(4, 8), strides=(2,)),
        _images(2, 1, 16, 16, 16),
        _regress,
    ),
    "UNETR": Network(
        "monai",
        _of(
            _MONAI + "UNETR",
            in_channels=1,
            out_channels=2,
            img_size=32,
            feature_size=4,
            hidden_size=24,
            mlp_dim=48,
            num_heads=4,
        ),
        _images(1, 1, 32, 32, 32),
        _regress,
    ),
    "SwinUNETR": Network(
        "monai",
        _of(_MONAI + "SwinUNETR", in_channels=1, out_channels=2, spatial_dims=2, feature_size=12),
        _images(1, 1, 64, 64),
        _regress,
    ),
    "DenseNet121": Network(
        "monai",
        _of(_MONAI + "DenseNet121", spatial_dims=2, in_channels=1, out_channels=3),
        _images(4, 1, 32, 32),
        _regress,
    ),
    "VoxelMorph": Network("monai", _of(_MONAI + "VoxelMorph"), _images(1, 2, 32, 32, 32), _register),
    "DiffusionModelUNet": Network(
        "monai",
        _of(
            _MONAI + "DiffusionModelUNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 16),
            num_res_blocks=1,
            attention_levels=(False, True),
            norm_num_groups=4,
            num_head_channels=8,
        ),
        _images(2, 1, 16, 16),
        _denoise,
    ),
    "VQVAE": Network(
        "monai",
        _of(
            _MONAI + "VQVAE",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 8),
            num_res_channels=8,
            num_res_layers=1,
            downsample_parameters=((2, 4, 1, 1),) * 2,
            upsample_parameters=((2, 4, 1, 1, 0),) * 2,
            num_embeddings=16,
            embedding_dim=8,
        ),
        _images(2, 1, 16, 16),
        _quantize,
    ),
    "resnet18": Network(
        "timm", _of("timm.create_model", model_name="resnet18", num_classes=3), _images(4, 3, 64, 64), _regress
    ),
    "resnetblur50": Network(
        "timm", _of("timm.create_model", model_name="resnetblur50", num_classes=3), _images(2, 3, 64, 64), _regress
    ),
    "efficientnet_b0": Network(
        "timm",
        _of("timm.create_model", model_name="efficientnet_b0", num_classes=3, drop_rate=0.0),
        _images(4, 3, 64, 64),
        _regress,
        rate=1e-4,
    ),
    "convnext_atto": Network(
        "timm", _of("timm.create_model", model_name="convnext_atto", num_classes=3), _images(2, 3, 64, 64), _regress
    ),
    "swin_tiny": Network(
        "timm",
        _of(
            "timm.create_model",
            model_name="swin_tiny_patch4_window7_224",
            img_size=56,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            num_classes=3,
        ),
        _images(2, 3, 56, 56),
        _regress,
    ),
    "eva02_tiny": Network(
        "timm",
        _of("timm.create_model", model_name="eva02_tiny_patch14_224", img_size=56, depth=2, num_classes=3),
        _images(2, 3, 56, 56),
        _regress,
    ),
    "retinanet_resnet50_fpn": Network(
        "torchvision",
        _of("torchvision.models.detection.retinanet_resnet50_fpn", **_DETECTION),
        lambda: torch.rand(2, 3, 64, 64),
        _detect,
        rate=1e-4,
    ),
    "raft_small": Network(
        "torchvision",
        _of("torchvision.models.optical_flow.raft_small"),
        lambda: torch.rand(1, 3, 128, 128),
        _flow,
        rate=1e-4,
    ),
    "LlamaForCausalLM": Network(
        "transformers", _hugging("LlamaForCausalLM", "LlamaConfig", **_TEXT, intermediate_size=64), _token_ids, _words
    ),
    "T5ForConditionalGeneration": Network(
        "transformers",
        _hugging(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=96,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        ),
        _token_ids,
        _words,
    ),
}


class _Learner(LightningModule):
    """Overfits one batch, and makes a copy and a pickle of the network during the run."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = NETWORKS[name]
        self.net, self.batch = self.network.make(), self.network.batch()
        self.losses: list[float] = []
        self.copies: list[nn.Module] = []
        self.pickled = b""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss of the one batch, with the same random numbers in every step."""
        torch.manual_seed(1)
        loss = self.network.loss(self.net, self.batch)
        self.losses.append(loss.item())
        return loss

    def on_train_start(self) -> None:
        """Copy and pickle the network before the first call, as some networks cannot be copied afterwards."""
        file = io.BytesIO()
        torch.save(self.net, file)
        self.pickled = file.getvalue()
        self.copies = [copy.deepcopy(self.net), torch.load(io.BytesIO(self.pickled), weights_only=False)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train all weights with Adam."""
        return torch.optim.Adam(self.net.parameters(), lr=self.network.rate)

    def train_dataloader(self) -> Any:
        """Return a loader with one number per step."""
        return torch.utils.data.DataLoader(range(STEPS))  # type: ignore[arg-type]


class Outcome(NamedTuple):
    """The result of a run: its last loss, and remarks about errors, warnings and leftovers."""

    loss: float
    remarks: list[str]


def train(name: str, way: str) -> Outcome:
    """Train a network in one of the ``WAYS``."""
    options: dict[str, Any] = {"precision": {"float32": "32-true"}.get(way, way)}
    if way.startswith("O"):
        options = {"plugins": [ApexAMP(way, dtype=torch.bfloat16)]}  # type: ignore[arg-type]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner = _Learner(name)
            hooks = _hooks_of(learner.net)
            trainer = Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet, **options)
            trainer.fit(learner)
    except Exception as error:  # becomes a remark in the table
        return Outcome(float("nan"), [f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"])
    warned = {str(each.message).partition(" ")[0] + " warned" for each in caught if each.category is TurboWarning}
    return Outcome(learner.losses[-1], [*sorted(warned), *_problems(learner, hooks, way)])


def _problems(learner: _Learner, hooks: list[int], way: str) -> Iterator[str]:
    # The last loss alone may be high: the first steps of Adam oscillate.
    if not min(learner.losses[1:]) < learner.losses[0] or not math.isfinite(learner.losses[-1]):
        yield f"does not learn ({learner.losses[0]:.3g} to {learner.losses[-1]:.3g})"
    if {tensor.dtype for tensor in learner.net.state_dict().values() if tensor.is_floating_point()} != {torch.float32}:
        yield "leaves half tensors"
    if _hooks_of(learner.net) != hooks:
        yield "leaves hooks"
    if b"lightning_turbo" in learner.pickled:
        yield "a pickle names this package"
    for twin in learner.copies:
        if way != "O3" and any(p.dtype is not torch.float32 for p in twin.parameters()):
            yield "a copy is not in float32"


def _hooks_of(net: nn.Module) -> list[int]:
    return [len(getattr(part, kind)) for part in net.modules() for kind in HOOKS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train networks of MONAI, timm, torchvision and transformers at O1, O2 and O3, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks networks", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=f"{', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a page to this file")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows, missing = [], []
    started = time.monotonic()
    for name in options.names or NETWORKS:
        if importlib.util.find_spec(NETWORKS[name].package) is None:
            missing.append(name)
            continue
        with _one_thread():
            rows.append(_row(name))
        print_lines(" | ".join(rows[-1]))
    minutes = (time.monotonic() - started) / 60
    columns = ["Network", "Package", "Loss in float32", *(f"{way}, %" for way in WAYS[1:]), "Remarks"]
    table = markdown_table(columns, rows)
    if options.out is not None:
        options.out.write_text("\n".join([*_head(missing, minutes), *table, ""]))
    print_lines("", *table)
    return 0


def _row(name: str) -> list[str]:
    outcomes = {way: train(name, way) for way in WAYS}
    reference = outcomes["float32"].loss
    cells = [f"{100 * outcomes[way].loss / reference:.1f}" for way in WAYS[1:]]
    remarks = [f"{way}: {remark}" for way, outcome in outcomes.items() for remark in outcome.remarks]
    return [f"`{name}`", NETWORKS[name].package, f"{reference:.4g}", *cells, "; ".join(remarks)]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the networks are small, and sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _head(missing: list[str], minutes: float) -> list[str]:
    machine = describe_machine("cpu")
    packages = {NETWORKS[name].package for name in NETWORKS if name not in missing}
    versions = ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in ("torch", *sorted(packages)))
    lines = [
        "# Networks of other packages at O1, O2 and O3",
        "",
        f"Command, on {date.today()}: `python -m benchmarks networks --out FILE`, {minutes:.0f} minutes on one thread.",
        f"{machine['processor']}, {machine['cores']} cores, {versions}.",
        "",
        f"Small networks with random weights overfit one batch in {STEPS} steps of Adam. The columns show the last",
        "loss with bfloat16, in per cent of that in float32. After each run the module is float32 and has no hooks of",
        "this package, and a copy and a pickle made during the run are plain float32 networks; the last column lists",
        "exceptions. `RetinaNet warned` and the like: the network returns a loss that it computed in half precision.",
        "",
        "No network here has a 3D convolution whose input is 2 deep: on CPUs with AVX-512, oneDNN computes the",
        "bfloat16 gradient of its weight from uninitialized memory, also with `bf16-mixed`.",
        "",
    ]
    if "torchvision" in packages and not importlib.import_module("torchvision.extension")._has_ops():
        lines += [
            "torchvision's compiled operators are for another torch version; no network here calls one in training.",
            "",
        ]
    return [*lines, *([f"Not installed: {', '.join(missing)}.", ""] if missing else [])]
