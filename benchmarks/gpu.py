"""The suite ``gpu``: every measurement on one GPU, the most important rows first, so that a run may end early.

``python -m benchmarks gpu --minutes 27`` takes half an hour, and ``--resume`` continues it. With at most ten minutes,
for example ``--minutes 6``, only the most telling rows are measured, one group for each part of the package. On a CPU
networks and batches are tiny, and the numbers only show that the cases run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, supported_activities
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import groups, lengths, loading, overhead, patches
from benchmarks.loaders import Pillow, dali_photos, dynamic_photos, forever, make_loader, make_photos
from benchmarks.memory import memory
from benchmarks.precision import autocast, half_inputs, plain_o2
from benchmarks.suite import Case, CaseTimer, SkippedError, Suite
from benchmarks.work import Endless, plain_loop, resnet50, sgd

__all__ = ["SUITE", "ProfilingTimer", "count_kernels", "kernels_of"]

ROOT = Path(__file__).parents[1]
PROFILED = 3  # steps under the profiler


def count_kernels(spans: Iterable[tuple[float, float]], steps: int) -> dict[str, float]:
    """Return the number of kernels per step, and the fraction of the time during which at least one of them runs.

    Args:
        spans: Start and end of each kernel, in any unit.
        steps: Number of steps in which the kernels ran.
    """
    ordered = sorted(spans)
    if not ordered:
        return {}
    busy, latest = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return {"kernels_a_step": len(ordered) / steps, "busy_share": busy / (latest - ordered[0][0])}


class ProfilingTimer:
    """A timer that lets a case run some more steps after the last round, and profiles them.

    The case calls ``step`` as usual. When ``step`` returns ``False``, profiling has ended and ``numbers`` holds the
    reserved memory, the number of synchronizations per step, and the number of kernels; on a CPU, only the number of
    operators that call no other operators.
    """

    def __init__(self, timer: CaseTimer) -> None:
        self._timer = timer
        self._steps = 0
        self._rest = self._profile()
        self.numbers: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def step(self, samples: int = 0) -> bool:
        """Report that a step is done, and return whether to do another one."""
        self._steps += 1
        if not self._timer.over and self._timer.step(samples):
            return True
        return next(self._rest, False)

    def _profile(self) -> Iterator[bool]:
        cuda = self._timer.device.type == "cuda"
        if cuda:
            self.numbers["reserved_bytes"] = torch.cuda.max_memory_reserved()
        while self._steps < 30:  # so that the losses of all cases are those of the same steps
            yield True
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield True
            torch.cuda.set_sync_debug_mode("default")
            self.numbers["fetched_a_step"] = sum("synchronizing CUDA operation" in str(each.message) for each in caught)
        sees_kernels = cuda and ProfilerActivity.CUDA in supported_activities()  # without CUPTI, torch sees none
        with profile(activities=[ProfilerActivity.CUDA if sees_kernels else ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                yield True
            self._timer.synchronize()
        self.numbers |= kernels_of(profiler.events(), sees_kernels)


def kernels_of(events: Any, cuda: bool) -> dict[str, float]:
    """Count kernels in the events of the profiler; if ``cuda`` is false, operators that call no other operators."""
    if not cuda:
        leaves = [each for each in events if each.name.startswith("aten::") and not each.cpu_children]
        return {"operators_a_step": len(leaves) / PROFILED}
    # Annotations, such as those of torch's optimizers, are events of the device too.
    on_device = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [each.time_range for each in on_device if not getattr(each, "is_user_annotation", False)]
    return count_kernels([(each.start, each.end) for each in kernels], PROFILED)


def profiled(timer: CaseTimer, *, what: str, **config: Any) -> dict[str, float]:
    """Run one of ``RUNS``, and profile a few steps after the timed ones."""
    float16 = "'16-mixed'" in str(config) or "fp16" in str(config)
    if timer.device.type == "cpu" and (float16 or config.get("graph")):
        raise SkippedError("needs a GPU")
    profiling = ProfilingTimer(timer)
    numbers = RUNS[what](cast(CaseTimer, profiling), **config)
    return {**numbers, **profiling.numbers}


class _UNet(nn.Module):
    """A 3D UNet of three levels that segments volumes into two classes."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(inside: int, outside: int, stride: int) -> nn.Module:
            first = nn.Conv3d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()
            return nn.Sequential(
                *first, nn.Conv3d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()
            )

        self.down = nn.ModuleList([block(1, width, 1), block(width, 2 * width, 2), block(2 * width, 4 * width, 2)])
        self.up = nn.ModuleList([block(6 * width, 2 * width, 1), block(3 * width, width, 1)])
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 2, *size)``."""
        levels = []
        for block in self.down:
            x = block(x)
            levels.append(x)
        for block, skip in zip(self.up, reversed(levels[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.head(x)


class _Transformer(nn.Module):
    """A transformer that predicts a token at each position."""

    def __init__(self, depth: int, width: int, tokens: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(batch, tokens, positions)``."""
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


def _task(timer: CaseTimer, task: str, tuned: bool = True) -> tuple[nn.Module, Endless]:
    """Return network and batches of a task on the device; ``tuned`` means channels-last and cuDNN's search."""
    kind, batch, size = TASKS[task]
    if small := timer.quick or timer.device.type == "cpu":
        batch, size = 2, SMALL.get(kind, 16)
    torch.backends.cudnn.benchmark = tuned
    generator = torch.Generator(timer.device).manual_seed(timer.seed)
    factory: dict[str, Any] = {"device": timer.device, "generator": generator}
    if kind == "transformer":
        net, tokens = (_Transformer(1, 64, 64), 64) if small else (_Transformer(12, 768, 8192), 8192)
        return net.to(timer.device), Endless(_texts((batch, size), tokens, factory))
    if kind == "UNet":
        images = [torch.randn(batch, 1, size, size, size, **factory) for _ in range(2)]
        batches = [(x, (x[:, 0] > 0).long()) for x in images]
        return _formatted(timer, _UNet(4 if small else 32), batches, tuned)
    shape = (batch, 3, size, size) if kind == "ResNet-50" else (batch, 1, size, size, size)
    batches = [(torch.randn(*shape, **factory), torch.randint(10, (batch,), **factory)) for _ in range(2)]
    return _formatted(timer, resnet50(len(shape) - 2, 10), batches, tuned)


def _texts(shape: tuple[int, int], tokens: int, factory: dict[str, Any]) -> list[Any]:
    texts = [torch.randint(tokens, shape, **factory) for _ in range(2)]
    return [(text, text.roll(1, 1)) for text in texts]


def _formatted(timer: CaseTimer, net: Any, batches: list[Any], tuned: bool) -> tuple[nn.Module, Endless]:
    last = torch.channels_last if batches[0][0].ndim == 4 else torch.channels_last_3d
    memory_format = last if tuned else torch.contiguous_format
    batches = [(images.contiguous(memory_format=memory_format), labels) for images, labels in batches]
    return net.to(timer.device, memory_format=memory_format), Endless(batches)


def plain(
    timer: CaseTimer,
    *,
    task: str,
    dtype: str = "",
    mode: str = "",
    graph: bool = False,
    half: bool = False,
    o2: bool = False,
    lists: str = "",
) -> dict[str, float]:
    """Run the best loop written by hand, the bound for a Trainer; ``lists`` adds O1 with these lists of functions."""
    net, loader = _task(timer, task)
    if o2:
        return plain_o2(timer, net, loader)
    if half:
        half_inputs(net.to(torch.bfloat16))
    optimizer = sgd(net.parameters(), fused=True)
    if lists:
        return _initialized(timer, net, loader, optimizer, lists)
    if mode:
        net = cast(nn.Module, torch.compile(net, mode=mode))
    if graph:
        return _graphed(timer, net, loader, optimizer)
    return autocast(timer, net, loader, optimizer, dtype) if dtype else plain_loop(timer, net, loader, optimizer)


def _initialized(timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Any, lists: str) -> dict[str, float]:
    """Run O1 of ``amp.initialize``, which casts functions by the lists of apex or of torch; in float16 on a GPU."""
    from lightning_turbo import amp

    net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0, cast_lists=lists)

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return plain_loop(timer, net, loader, optimizer, backward=backward)


def _graphed(timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Any) -> dict[str, float]:
    """Capture the whole step with autocast as a CUDA graph, and replay it on batches copied into its inputs."""
    images, labels = (each.clone() for each in loader.batches[0])

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(net(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for batch in loader:
        images.copy_(batch[0])
        labels.copy_(batch[1])
        graph.replay()
        if not timer.step(samples=len(labels)):
            break
    return {"loss": loss.item()}


def lightning(timer: CaseTimer, *, task: str, tuned: bool = True, **options: Any) -> dict[str, float]:
    """Run the same training in a Trainer; the options are arguments of ``train``."""
    from benchmarks.training import Classifier, train

    net, loader = _task(timer, task, tuned)
    module = Classifier(net, partial(sgd, fused=tuned))
    return train(timer, module, loader, samples=len(loader.batches[0][1]), benchmark=tuned, **options)


def fed(timer: CaseTimer, *, feed: str) -> dict[str, float]:
    """Train ResNet-50 in bfloat16, channels-last, on images from the device, from host memory, or from files."""
    net: Any = resnet50(2, 3).to(timer.device)
    net = net.to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as folder:
        loader: Any = _feed(timer, Path(folder), feed)
        target: dict[str, Any] = {"device": timer.device, "non_blocking": True}
        batches = (
            (images.to(memory_format=torch.channels_last, **target), labels.to(**target))
            for images, labels in forever(loader)
        )
        forward = partial(torch.autocast, timer.device.type, torch.bfloat16)
        result = plain_loop(timer, net, batches, sgd(net.parameters(), fused=True), forward=forward)
        if hasattr(loader, "close"):
            loader.close()
        return result


def _feed(timer: CaseTimer, folder: Path, feed: str) -> Iterable[Any]:
    from lightning_turbo.data import DevicePrefetcher, PrefetchLoader
    from lightning_turbo.data.dali import DALILoader, ImageFolder

    batch, size = (2, 32) if timer.quick or timer.device.type == "cpu" else (128, 224)
    labels = torch.arange(8 * batch) % 3
    if feed == "synthetic":
        return [(torch.randn(batch, 3, size, size, device=timer.device), labels[:batch].to(timer.device))]
    if feed in ("memory", "prefetched"):  # so that loading only collates and copies
        dataset = TensorDataset(torch.randn(8 * batch, 3, size, size), labels)
        if feed == "memory":
            return DataLoader(dataset, batch, pin_memory=timer.device.type == "cuda")
        return DevicePrefetcher(PrefetchLoader(dataset, batch), timer.device)
    root = make_photos(timer, folder)
    if feed == "dali":
        recipe = ImageFolder(root, train=True, size=size, channels_last=True)
        return DALILoader(recipe, batch, device=timer.device, drop_last=True, seed=timer.seed)
    return make_loader(Pillow(root, size, raw=feed == "timm"), 2, feed, timer.device)


def small_tensors(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Load batches of many small tensors with two worker processes, pin them, and copy them to the device."""
    target: dict[str, Any] = {"device": timer.device, "non_blocking": True}
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": list, "pin_memory": timer.device.type == "cuda"}
    for batch in loading.LOADERS[by](loading.Fields(), 16, shuffle=True, **options):
        moved = [{name: field.to(**target) for name, field in sample.items()} for sample in batch]
        if not timer.step(samples=len(moved)):
            break
    return {}


def volumes(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Train a 3D UNet in bfloat16 on patches of scans, from ``PatchDataset`` or MONAI's ``CacheDataset`` and crop."""
    timer.quick |= timer.device.type == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        files = patches.write_scans(timer, Path(folder))
        data, collate = patches.MAKERS[by](timer, Path(folder), files)
        batch = 4 if by == "packed" else 1  # MONAI's crop returns four patches of one scan
        loader = DataLoader(data, batch, shuffle=True, num_workers=2, collate_fn=collate, persistent_workers=True)
        move = partial(torch.Tensor.to, device=timer.device, non_blocking=True)
        batches = (
            (move(each["image"], dtype=torch.float32), move(each["label"][:, 0], dtype=torch.long))
            for each in forever(loader)
        )
        net = _UNet(4 if timer.quick else 32).to(timer.device)
        forward = partial(torch.autocast, timer.device.type, torch.bfloat16)
        return plain_loop(timer, net, batches, sgd(net.parameters(), fused=True), forward=forward)


def stop_twice(timer: CaseTimer, *, ours: bool) -> dict[str, float]:
    """Count samples that a run repeats and loses when it is stopped twice and resumed with other numbers of workers."""
    from examples.demo.stops import run

    warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # expected in the stock run
    with tempfile.TemporaryDirectory() as folder:
        counts = run(Path(folder), ours=ours, accelerator="gpu" if timer.device.type == "cuda" else "cpu")
    while timer.step():
        time.sleep(0.01)  # an empty step: the result is the number of samples
    return {name: float(count) for name, count in counts.items()}


def program(timer: CaseTimer, *, name: str) -> dict[str, Any]:
    """Run the tests that need a GPU, or ``tune`` or ``doctor`` on an example, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        minutes = "0.3" if timer.quick else "3"
        arguments = {
            "tests": ["pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *["--collect-only"] * timer.quick],
            "tune": ["lightning_turbo", "tune", "--minutes", minutes, "--out", folder, "examples/tune/toy.py"],
            "doctor": ["lightning_turbo", "doctor", "--json", f"{folder}/doctor.json", "examples/tune/toy.py"],
        }[name]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)
        numbers: dict[str, Any] = {"program_seconds": time.perf_counter() - started, "exit_status": done.returncode}
        sys.stderr.write(done.stdout + done.stderr)
        for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|finding)", done.stdout):
            numbers[what] = int(count)
        if (results := Path(folder, "tune.json")).is_file():
            found = json.loads(results.read_text())
            chosen = ", ".join(found["chosen"]["settings"]) or "nothing"
            numbers |= {"chosen": chosen, "promised": (found["promise"]["interval"] or [None])[0]}
    while timer.step():
        time.sleep(0.01)  # an empty step: the result is `program_seconds`
    return numbers


def prepare(timer: CaseTimer) -> dict[str, Any]:
    """Return facts about the GPU: name, driver, clocks, TF32, and its speed of copies and matrix products."""
    device, cuda = timer.device, timer.device.type == "cuda"
    facts: dict[str, Any] = {
        "TF32 of matmul": str(torch.backends.cuda.matmul.allow_tf32),
        "TF32 of cuDNN": str(torch.backends.cudnn.allow_tf32),
    }
    if cuda and shutil.which("nvidia-smi"):
        fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        values = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].split(", ")
        facts |= dict(zip(fields.split(","), values, strict=False))

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        timer.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            work()
        timer.synchronize()
        return (time.perf_counter() - started) / 10

    size = 8192 if cuda and not timer.quick else 256
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        matrix = torch.randn(size, size, device=device).to(dtype)
        facts[f"matmul {name}, TFLOP/s"] = 2e-12 * size**3 / seconds(partial(torch.mm, matrix, matrix))
    host = torch.empty(size, size, pin_memory=cuda)
    first, second = host.to(device), host.to(device)
    facts["copy host to device, GB/s"] = 4e-9 * size**2 / seconds(partial(first.copy_, host, non_blocking=True))
    facts["copy on the device, GB/s"] = 4e-9 * size**2 / seconds(partial(first.copy_, second))
    if cuda:
        torch.cuda.empty_cache()
    return facts


RUNS: dict[str, Any] = {
    "plain": plain, "lightning": lightning, "fed": fed,
    "toy plain": overhead.plain, "toy lightning": overhead.lightning,
}  # fmt: skip
# Kind of network, batch size, and edge length of an image or number of tokens of a text.
TASKS = {
    "ResNet-50, batch 128": ("ResNet-50", 128, 224),
    "transformer 12 x 768": ("transformer", 16, 512),
    "3D ResNet-50, 64 x 28^3": ("3D ResNet-50", 64, 28),
    "3D UNet, 4 x 96^3": ("UNet", 4, 96),
    "ResNet-50, batch 16": ("ResNet-50", 16, 224),
    "ResNet-50, batch 256": ("ResNet-50", 256, 224),
}
SMALL = {"ResNet-50": 32, "transformer": 8}
FLOAT, AUTO, FP16 = "PyTorch float32", "PyTorch autocast bf16", "PyTorch autocast fp16"
COMPILED, REDUCED, BY_HAND = f"{AUTO}, compiled", f"{AUTO}, reduce-overhead", "PyTorch O2 by hand, bf16"
MIXED, HALF = "Lightning bf16-mixed", "PyTorch bf16 throughout"


def _amp(level: str, dtype: str | None = "bf16", **turbo: Any) -> dict[str, Any]:
    return {"amp": {"opt_level": level, "dtype": dtype}, **({"turbo": turbo} if turbo else {})}


# Name, arguments, the bound in the same configuration, and whether all tasks have the row or only the first one.
Rows = list[tuple[str, dict[str, Any], str, bool]]
BOUNDS: Rows = [
    (FLOAT, {}, FLOAT, True),
    (AUTO, {"dtype": "bf16"}, AUTO, True),
    (COMPILED, {"dtype": "bf16", "mode": "default"}, COMPILED, True),
    (BY_HAND, {"o2": True}, BY_HAND, True),
    (HALF, {"half": True}, HALF, False),
    (FP16, {"dtype": "fp16"}, FP16, False),
    (REDUCED, {"dtype": "bf16", "mode": "reduce-overhead"}, REDUCED, False),
    (f"{AUTO}, the whole step a graph", {"graph": True}, AUTO, False),
    ("O1 by amp.initialize, fp16, apex's lists", {"lists": "apex"}, FP16, False),
    ("O1 by amp.initialize, fp16, torch's lists", {"lists": "torch"}, FP16, False),
]
TRAINED: Rows = [
    ("Lightning 32-true, as it comes", {"tuned": False}, FLOAT, False),
    ("Lightning 32-true", {}, FLOAT, True),
    (MIXED, {"precision": "bf16-mixed"}, AUTO, True),
    ("O0", _amp("O0", None), FLOAT, False),
    ("O1, bf16", _amp("O1"), AUTO, True),
    ("O2, bf16", _amp("O2"), BY_HAND, True),
    ("O3, bf16", _amp("O3"), HALF, False),
    ("O1, bf16, strategy turbo", _amp("O1", lean=True), AUTO, True),
    ("O1, bf16, compiled", _amp("O1", compile="network"), COMPILED, True),
    ("O1, bf16, reduce-overhead", _amp("O1", compile={"mode": "reduce-overhead"}), REDUCED, False),
    ("Lightning 16-mixed", {"precision": "16-mixed"}, FP16, False),
    ("O1, fp16", _amp("O1", "fp16"), FP16, False),
    ("O2, fp16", _amp("O2", "fp16"), FP16, False),
]


def _training(task: str) -> list[Case]:
    """Return the cases of one task. Those of this package are also divided by Lightning's mixed precision.

    Cases that compile come last: each takes a minute to start, in which many others start.
    """
    rows = [(what, *row) for what, all_rows in (("plain", BOUNDS), ("lightning", TRAINED)) for row in all_rows]
    rows.sort(key=lambda row: "mode" in row[2] or "compile" in row[2].get("turbo", {}))
    return [
        Case(
            name=f"{task}: {name}", run=profiled, config={"what": what, "task": task, **config},
            base=f"{task}: {base}", against=(f"{task}: {MIXED}" if name[0] == "O" else f"{task}: {FLOAT}",),
            kind="ours" if name[0] == "O" else "torch",
        )
        for what, name, config, base, everywhere in rows
        if everywhere or task == next(iter(TASKS))
    ]  # fmt: skip


SYNTHETIC, TOY, EVEN = "feed: images on the device", "toy step: plain loop", "memory: Lightning 32-true"
LEAN = {"lean": True}
# Name, arguments, kind.
FEEDS = [
    (SYNTHETIC, {"feed": "synthetic"}, "torch"),
    ("feed: DataLoader, images in memory", {"feed": "memory"}, "torch"),
    ("feed: DevicePrefetcher, images in memory", {"feed": "prefetched"}, "ours"),
    ("feed: DataLoader, photographs", {"feed": "torch"}, "torch"),
    ("feed: DALILoader, photographs", {"feed": "dali"}, "ours"),
    ("feed: timm's PrefetchLoader, photographs", {"feed": "timm"}, "peer"),
]
# A few cases for each part of the package: name, function, arguments, base, kind, distributions that it needs.
Parts = list[tuple[str, Callable[..., Any], dict[str, Any], str, str, tuple[str, ...]]]
SMALL_TENSORS, ONE_EACH, SHUFFLED = "small tensors: DataLoader", "AdamW, fused: 465 groups", "texts: shuffled"
FORKSERVER, PHOTOS = "forkserver: DataLoader", "DALI: pipeline"
SCANS = "scans: MONAI's CacheDataset, ClassesToIndicesd, no metadata"
STOCK = "two stops: stock Lightning"
START: dict[str, Any] = {"method": "forkserver", "files": 40_000}
FUSED: dict[str, Any] = {"optimizer": "AdamW", "fused": True}
PARTS: Parts = [
    (SMALL_TENSORS, small_tensors, {"by": "DataLoader"}, SMALL_TENSORS, "torch", ()),
    ("small tensors: PrefetchLoader", small_tensors, {"by": "PrefetchLoader"}, SMALL_TENSORS, "ours", ()),
    (FORKSERVER, loading.start, {"by": "DataLoader", **START}, FORKSERVER, "torch", ()),
    ("forkserver: PrefetchLoader", loading.start, {"by": "PrefetchLoader", **START}, FORKSERVER, "ours", ()),
    (ONE_EACH, groups.step, FUSED, ONE_EACH, "torch", ()),
    ("AdamW, fused: merged", groups.step, {"merged": True, **FUSED}, ONE_EACH, "ours", ()),
    (STOCK, stop_twice, {"ours": False}, STOCK, "torch", ()),
    ("two stops: ExactResume", stop_twice, {"ours": True}, STOCK, "ours", ()),
    (SCANS, volumes, {"by": "bare"}, SCANS, "peer", ("monai", "nibabel")),
    ("scans: PatchDataset", volumes, {"by": "packed"}, SCANS, "ours", ("nibabel",)),
    (SHUFFLED, lengths.epochs, {"order": "shuffled", "texts": 128}, SHUFFLED, "torch", ()),
    ("texts: LengthBatchSampler", lengths.epochs, {"order": "LengthBatchSampler(batch_size=)", "texts": 128}, SHUFFLED,
     "ours", ()),
    (PHOTOS, dali_photos, {"uint8": False}, PHOTOS, "ours", ()),
    ("DALI: dynamic mode", dynamic_photos, {}, PHOTOS, "ours", ()),
]  # fmt: skip
TOYS: list[tuple[str, dict[str, Any], str]] = [
    (TOY, {}, "torch"),
    ("toy step: Lightning", {}, "torch"),
    ("toy step: ApexAMP O1", {"amp": {"opt_level": "O1", "dtype": "bf16"}}, "ours"),
    ("toy step: strategy turbo, lean", {"turbo": LEAN}, "ours"),
    ("toy step: Preemption", {"callback": "Preemption"}, "ours"),
]
LEVELS: list[tuple[str, dict[str, Any], str]] = [
    (EVEN, {}, "torch"),
    ("memory: GradToNone", {"release": True}, "ours"),
    ("memory: O2", {"amp": {"opt_level": "O2", "dtype": "bf16"}}, "ours"),
]
PROGRAMS = {"tests": "the tests that need a GPU", "tune": "tune on the toy example", "doctor": "doctor on it"}
FIRST, *OTHERS = TASKS
TELLING = (
    *(name for name, *_ in PARTS), *(name for name, *_ in TOYS),
    *(f"{FIRST}: {name}" for name in (FLOAT, AUTO, BY_HAND, MIXED, "O1, bf16", "O2, bf16")),
    *(f"3D UNet, 4 x 96^3: {name}" for name in (FLOAT, AUTO, BY_HAND, MIXED, "O2, bf16")),
)  # fmt: skip
SUITE = Suite(
    name="gpu",
    about="One GPU: Lightning and this package, compared with a loop written by hand in the same configuration.",
    cases=[
        *_training(FIRST),
        *(Case(name=n, run=run, config=c, base=b, kind=k, needs=needs) for n, run, c, b, k, needs in PARTS),
        *(Case(name=n, run=profiled, config={"what": "fed", **c}, base=SYNTHETIC, kind=k) for n, c, k in FEEDS),
        *(case for task in OTHERS[:2] for case in _training(task)),
        *(
            Case(name=name, run=profiled, base=TOY, kind=kind,
                 config={"what": "toy plain" if name == TOY else "toy lightning", **config})
            for name, config, kind in TOYS
        ),
        *(Case(name=f"program: {text}", run=program, config={"name": name}, base=f"program: {text}", kind="ours")
          for name, text in PROGRAMS.items()),
        *(case for task in OTHERS[2:] for case in _training(task)),
        *(Case(name=n, run=memory, config={"kind": "even", **c}, base=EVEN, kind=k) for n, c, k in LEVELS),
    ],
    quick=(TOY, "toy step: strategy turbo, lean"),
    telling=TELLING,
    steps=1,
    rounds=9,
    warmup=10,
    lead=3,
    round_seconds=0.5,
    seconds=7200,
    forked=True,
    prepare=prepare,
)  # fmt: skip
