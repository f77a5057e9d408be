"""Four comparisons in two minutes: patches of scans, a run stopped twice, an apex loop, boxes from worker processes."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.demo import boxes, levels, patches, stops, volumes
from examples.demo.data import load_mni

MIN_ACCURACY = 0.95  # on the validation set of digits, for each level
LEVELS = ("O0", "O1", "O2", "O3")
TECHNIQUES = "prefetch,workers-1,workers-2,lean,O1,O2"  # of those that tune knows; two minutes are enough for these


def save(results: dict[str, Any], out: Path) -> None:
    """Write the results so far, so that Ctrl-C loses at most one part."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))


def summarize(results: dict[str, Any]) -> list[str]:
    """Return one sentence for each part of the results."""
    found, stopped, box = results["patches"], results["stops"], results["boxes"]
    rates, times = found["patches_per_second"], box["milliseconds_a_batch"]
    reached = ", ".join(f"{level} {row['accuracy']:.1%}" for level, row in results["levels"].items())
    return [
        (
            f"Patches of scans per second: {rates['ours']:,.0f} with PatchDataset, {rates['plain']:,.1f} with a "
            f"dataset that reads whole scans ({found['factor']:,.0f} times as many). "
            f"Packing took {found['packing_seconds']:.1f} s."
        ),
        (
            f"A run that is stopped twice and resumes with another number of workers: of {stopped['samples']} samples, "
            f"{stopped['ours']['twice']} are seen twice and {stopped['ours']['never']} never; with stock Lightning, "
            f"{stopped['stock']['twice']} and {stopped['stock']['never']}."
        ),
        f"An apex loop with one import changed: accuracy on digits {reached}.",
        (
            f"Batches of boxes from two worker processes: {times['ours']:.1f} ms with PrefetchLoader, "
            f"{times['plain']:.1f} ms with DataLoader ({box['factor']:.1f} times as fast)."
        ),
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw one comparison per panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, stopped, box = results["patches"], results["stops"], results["boxes"]
    rates, times = found["patches_per_second"], box["milliseconds_a_batch"]
    picture = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(2, 2).flat
    ours, other = "#0f766e", "#94a3b8"
    panels = (
        (f"Patches of scans a second: {found['factor']:,.0f} times as many", "a dataset that\nreads each scan",
         rates["plain"], "PatchDataset", rates["ours"], "{:,.0f}"),
        (f"Samples seen twice or never after two stops, of {stopped['samples']}", "stock Lightning",
         stopped["stock"]["twice"] + stopped["stock"]["never"], "ExactResume",
         stopped["ours"]["twice"] + stopped["ours"]["never"], "{:.0f}"),
        (f"A batch of boxes from workers, ms: {box['factor']:.1f} times as fast", "DataLoader", times["plain"],
         "PrefetchLoader", times["ours"], "{:.1f}"),
    )  # fmt: skip
    for axis, (title, theirs, their_value, name, value, form) in zip(axes, panels, strict=False):
        bars = axis.barh([theirs, name], [their_value, value], color=[other, ours])
        axis.bar_label(bars, [form.format(their_value), form.format(value)], padding=3)
        axis.margins(x=0.15)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    axis = picture.axes[3]
    for level, row in results["levels"].items():
        losses = torch.tensor(row["losses"]).unfold(0, min(15, len(row["losses"])), 1).mean(1)
        axis.plot(losses, label=f"{level}  {row['accuracy']:.1%}", linewidth=1.2)
    axis.set_title("An apex loop with one import changed", fontsize=10, loc="left")
    axis.set(xlabel="step", ylabel="loss")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, title="accuracy")
    picture.savefig(path, dpi=140)


def tune(minutes: float, out: Path, device: str) -> None:
    """Run ``tune`` on a script that trains on compressed volumes."""
    files = volumes.write_volumes(load_mni().train, out / "volumes")
    print(f"tune, for {minutes:g} minutes, on a script that trains on {len(files)} compressed volumes:", flush=True)
    command = ["tune", "--minutes", f"{minutes:g}", "--only", TECHNIQUES, "--out", str(out / "tune")]
    script = [volumes.__file__, str(out / "volumes"), device]
    subprocess.run([sys.executable, "-m", "lightning_turbo", *command, *script], check=True)


def main(argv: list[str] | None = None) -> int:
    """Run the parts and return the exit status: 1 if the accuracy of a level is below ``MIN_ACCURACY``."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--levels", type=lambda text: text.split(","), default=list(LEVELS))
    parser.add_argument("--epochs", type=int, default=10, help="epochs on digits (default: 10)")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds each for patches and boxes (default: 10)")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes to run tune on volumes (default: 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(argv)
    if unknown := set(options.levels) - set(LEVELS):
        parser.error(f"--levels: expected some of O0,O1,O2,O3 (letter O, not zero), got {','.join(sorted(unknown))}")
    torch.set_num_threads(1)  # the layers are too small for more threads
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.. is deprecated.*")  # Lightning's own
    began, out = time.perf_counter(), options.out
    results: dict[str, Any] = {}
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # expected of the stock run
    with tqdm(total=6 + len(options.levels), bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:

        def step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        results["patches"] = patches.measure(out, options.seconds, step)
        save(results, out)
        results["stops"] = stops.measure(out, step)
        save(results, out)
        results["levels"] = levels.measure(options.levels, options.epochs, options.device, step)
        save(results, out)
        results["boxes"] = boxes.measure(options.seconds, step)
        save(results, out)
        step("")
    print(*summarize(results), sep="\n", flush=True)
    draw(results, out / "demo.png")
    print(f"wrote {out / 'demo.png'} and {out / 'results.json'} ({time.perf_counter() - began:.0f} s)", flush=True)
    if options.minutes:
        tune(options.minutes, out, options.device)
    low = {level: row["accuracy"] for level, row in results["levels"].items() if row["accuracy"] < MIN_ACCURACY}
    for level, accuracy in low.items():
        print(f"{level}: expected an accuracy of {MIN_ACCURACY}, got {accuracy:.3f}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
