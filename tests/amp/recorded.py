"""Training cases recorded with NVIDIA's apex (tests/recorded/apex), run with this library."""

import fnmatch
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

FOLDER = Path(__file__).parents[1] / "recorded" / "apex"
INDEX = json.loads((FOLDER / "index.json").read_text())
CASES = {row["id"]: row for row in INDEX["cases"]}


def tables(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def recorded_arrays(row):
    with np.load(FOLDER / row["file"], allow_pickle=False) as file:
        return dict(file)


def build_model(row, arrays):
    layers = {
        "mlp": lambda: [
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4),
        ],
        "convbn": lambda: [
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        ],
        "conv3d": lambda: [
            nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            nn.Linear(4, 1),
        ],
    }  # fmt: skip
    model = nn.Sequential(*layers[row["model"]]())
    if row["unused_module"]:
        extra = nn.Linear(4, 4)
        model.forward = lambda x, run=list(model): _chain(run, x)
        model.add_module(row["unused_module"], extra)
    model.load_state_dict({k[5:]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith("init/")})
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in row["frozen"]):
            parameter.requires_grad_(False)
    return model


def _chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def build_optimizer(row, model):
    spec = dict(row["optimizer"])
    kind = getattr(torch.optim, spec.pop("name"))
    if row["param_groups"]:
        rest = dict(model.named_parameters())
        groups = []
        for group in row["param_groups"]:
            pattern = group["params"]
            names = [n for n in rest if pattern == "all others" or fnmatch.fnmatch(n, pattern)]
            groups.append({**group, "params": [rest.pop(n) for n in names]})
        return kind(groups, **spec)
    return kind(model.parameters(), **spec)


def build_loss(row):
    if row["model"] == "conv3d":
        return nn.BCEWithLogitsLoss(pos_weight=torch.tensor([10.0]))
    return nn.CrossEntropyLoss()


def dtype_name(tensor):
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def round_weights(models, opt_level):
    """Round the weights that are half at O2, because apex creates its master weights from half weights."""
    modules = [module for model in (models if isinstance(models, list) else [models]) for module in model.modules()]
    kept = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for module in modules if opt_level == "O2" else ():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype is torch.float32 and not isinstance(module, kept):
                tensor.copy_(tensor.half())


def largest_change(before, after):
    return max(float((a.float() - b.detach().float()).abs().max()) for a, b in zip(before, after, strict=True))


def run_case(row, amp):
    """Train one recorded case and return the arrays that its file contains."""
    arrays = recorded_arrays(row)
    model = build_model(row, arrays)
    optimizer = build_optimizer(row, model)
    criterion = build_loss(row)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=row["opt_level"], dtype=torch.float16, verbosity=0,
        scale_window=row["scale_window"], **row["initialize_overrides"],
    )  # fmt: skip
    round_weights(model, row["opt_level"])
    # Copies have torch's alignment, because some kernels round differently with other alignments.
    x, y = torch.from_numpy(arrays["x"]).clone(), torch.from_numpy(arrays["y"]).clone()
    steps, micro = row["steps"], row["micro_batches"]
    batch_index = arrays["batch_index"].reshape(steps, micro)
    loss_mult = arrays["loss_mult"].reshape(steps, micro)
    params = list(amp.master_params(optimizer))
    order = list(row["optimizer_param_order"])
    got = {k: [] for k in ("loss", "scale", "scale_after", "unskipped_after", "grad_norm", "max_abs_change",
                           "max_abs_change_master")}  # fmt: skip
    result = {}
    model.register_forward_pre_hook(  # the dtype that it computes with
        lambda module, args: result.update(params={n: dtype_name(p) for n, p in module.named_parameters()})
    )
    for step in range(steps):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        before_master = [p.detach().clone() for p in params]
        for m in range(micro):
            b = int(batch_index[step, m])
            out = model(x[b])
            if step == 0 and m == 0:
                result["out0"] = out.detach().clone()
            loss = criterion(out, y[b])
            got["loss"].append(loss.item())
            result["loss_dtype"] = dtype_name(loss)
            if loss_mult[step, m] != 1:
                loss = loss * float(loss_mult[step, m])
            if micro > 1:
                loss = loss / micro
            got["scale"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads])).item() if grads else 0.0
        result["dtypes_master_grads"] = {n: dtype_name(p.grad) for n, p in zip(order, params, strict=True)}
        if step == 0:
            for name, p in zip(order, params, strict=True):
                if p.grad is not None:
                    result[f"grad0/{name}"] = p.grad.detach().clone()
        if row["clip_max_norm"]:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), row["clip_max_norm"])
        optimizer.step()
        state = amp.state_dict()["loss_scaler0"]
        got["scale_after"].append(state["loss_scale"])
        got["unskipped_after"].append(state["unskipped"])
        got["grad_norm"].append(float("nan") if step in row["skipped_steps"] else norm)
        got["max_abs_change"].append(largest_change(before, model.parameters()))
        got["max_abs_change_master"].append(largest_change(before_master, params))
        if step == 0:
            for name, p in model.named_parameters():
                result[f"p1/{name}"] = p.detach().clone()
    for name, p in model.named_parameters():
        result[f"final_stored/{name}"] = p.detach().clone()
    for name, b in model.named_buffers():
        result[f"final_buf/{name}"] = b.clone()
    for name, p in zip(order, params, strict=True):
        result[f"master/{name}"] = p.detach().clone()
    result.update({k: np.asarray(v) for k, v in got.items()})
    result["state_dict"] = {k: dtype_name(v) for k, v in model.state_dict().items()}
    result["output"] = dtype_name(result["out0"])
    result["master_params"] = {n: dtype_name(p) for n, p in zip(order, params, strict=True)}
    result["optimizer_state"] = {
        n: {k: dtype_name(v) for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        for n, p in zip(order, params, strict=True)
        if p in optimizer.state
    }
    result["amp_state_dict"] = {k: dict(v) for k, v in amp.state_dict().items()}
    model.eval()
    with torch.no_grad():
        result["eval_out"] = model(x[0]).clone()
    return arrays, result
