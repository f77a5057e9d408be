"""What is sure on any machine, in two minutes: patches of scans, two stops, an apex loop, boxes from workers."""

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

FLOOR = 0.95  # validation accuracy that every level has to reach on digits
LEVELS = ("O0", "O1", "O2", "O3")
TRIED = "prefetch,workers-1,workers-2,lean,O1,O2"  # what two minutes are enough for; tune itself knows more


def save(results: dict[str, Any], out: Path) -> None:
    """Write what is complete, so that Ctrl-C loses one part at most."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))


def say(results: dict[str, Any]) -> list[str]:
    """Return what was found, a line a part."""
    found, stopped, box = results["patches"], results["stops"], results["boxes"]
    rates, times = found["patches_per_second"], box["milliseconds_a_batch"]
    reached = ", ".join(f"{level} {row['accuracy']:.1%}" for level, row in results["levels"].items())
    return [
        (
            f"Patches of scans: {rates['ours']:,.0f} a second, {rates['plain']:,.1f} from a dataset that reads each "
            f"scan ({found['factor']:,.0f} times as many; packed once in {found['packing_seconds']:.1f} s)."
        ),
        (
            f"A run that is stopped twice and goes on with other worker processes: of {stopped['samples']} samples "
            f"{stopped['ours']['twice']} are seen twice and {stopped['ours']['never']} never; with stock Lightning "
            f"{stopped['stock']['twice']} and {stopped['stock']['never']}."
        ),
        f"An apex loop with one import changed, accuracy on digits: {reached}.",
        (
            f"Batches of boxes from two worker processes: {times['ours']:.1f} ms, {times['plain']:.1f} ms by "
            f"DataLoader ({box['factor']:.1f} times as fast)."
        ),
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw one message a panel: ours beside what it is compared with."""
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
    """Let ``tune`` look for what helps a script that trains on compressed volumes."""
    files = volumes.write_volumes(load_mni().train, out / "volumes")
    print(f"tune, on a script that trains on {len(files)} compressed volumes, for {minutes:g} minutes:", flush=True)
    command = ["tune", "--minutes", f"{minutes:g}", "--only", TRIED, "--out", str(out / "tune")]
    script = [volumes.__file__, str(out / "volumes"), device]
    subprocess.run([sys.executable, "-m", "lightning_turbo", *command, *script], check=True)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 1 if a level stays below the accuracy that it has to reach."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--levels", type=lambda text: text.split(","), default=list(LEVELS))
    parser.add_argument("--epochs", type=int, default=10, help="on digits; every level reaches its accuracy in 10")
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure patches, and boxes")
    parser.add_argument("--minutes", type=float, default=0.0, help="for tune on volumes; default: not run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(argv)
    if unknown := set(options.levels) - set(LEVELS):
        parser.error(f"--levels: expected some of O0,O1,O2,O3 (letter O, not zero), got {','.join(sorted(unknown))}")
    torch.set_num_threads(1)  # more would wait for each other on layers this small
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.. is deprecated.*")  # Lightning's own
    began, out = time.perf_counter(), options.out
    results: dict[str, Any] = {}
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # the stock run, on purpose
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
    print(*say(results), sep="\n", flush=True)
    draw(results, out / "demo.png")
    print(f"wrote {out / 'demo.png'} and {out / 'results.json'} ({time.perf_counter() - began:.0f} s)", flush=True)
    if options.minutes:
        tune(options.minutes, out, options.device)
    low = {level: row["accuracy"] for level, row in results["levels"].items() if row["accuracy"] < FLOOR}
    for level, accuracy in low.items():
        print(f"{level}: expected an accuracy of {FLOOR}, got {accuracy:.3f}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
