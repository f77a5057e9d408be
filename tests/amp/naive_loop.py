"""The recorded cases in plain torch: without amp, and those of O2 and O3 as handwritten loops."""

import contextlib
import types

import torch
from torch import nn

from lightning_turbo import amp
from tests.amp.recorded import build_loss, build_model, build_optimizer, recorded_arrays

# Plain torch in place of amp.
PLAIN = types.SimpleNamespace(
    initialize=lambda model, optimizer, **_: (model, optimizer),
    scale_loss=lambda loss, optimizer: contextlib.nullcontext(loss),
    master_params=amp.master_params,
    state_dict=lambda: {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}},
)


def naive(row):
    """A handwritten loop for O2 or O3: rounded master weights, one scale, one overflow check per backward pass."""
    arrays = recorded_arrays(row)
    model, o2 = build_model(row, arrays), row["opt_level"] == "O2"
    kept = {id(p) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and o2
            for p in (*m.parameters(), *m.buffers())}  # fmt: skip
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept and tensor.is_floating_point():
            tensor.data = tensor.data.half()
    optimizer = build_optimizer(row, model)
    masters = {}
    for group in optimizer.param_groups if o2 else []:
        for p in group["params"]:
            if p.dtype is torch.float16 and p.requires_grad:
                masters[p] = nn.Parameter(p.detach().float())
        group["params"] = [masters.get(p, p) for p in group["params"]]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    override = row["initialize_overrides"]
    dynamic = o2 and override.get("loss_scale") is None
    scale = min(65536.0, override.get("max_loss_scale", 2.0**24)) if dynamic else override.get("loss_scale", 1.0)
    criterion, unskipped, losses = build_loss(row), 0, []
    x, y = torch.from_numpy(arrays["x"]).clone(), torch.from_numpy(arrays["y"]).clone()
    index = arrays["batch_index"].reshape(row["steps"], row["micro_batches"])
    factors = arrays["loss_mult"].reshape(row["steps"], row["micro_batches"])
    for step in range(row["steps"]):
        total, skip = {}, False
        for b, factor in zip(index[step], factors[step], strict=True):
            for p in model.parameters():
                p.grad = None
            loss = criterion(model(x[b].half()).float(), y[b])
            losses.append(loss.item())
            if factor != 1:
                loss = loss * float(factor)
            if row["micro_batches"] > 1:
                loss = loss / row["micro_batches"]
            (loss.float() * scale).backward()
            weight_of = {master: weight for weight, master in masters.items()}
            found = False
            for p in held:
                grad = weight_of.get(p, p).grad
                if grad is None:
                    continue
                grad = grad.float() if p.dtype is torch.float32 else grad.clone()
                if scale != 1.0:
                    grad = grad * (1.0 / scale)
                found |= not bool(grad.isfinite().all())
                total[p] = grad if p not in total else grad + total[p]
            if dynamic:
                skip |= found
                if found:
                    scale, unskipped = max(scale / 2, override.get("min_loss_scale", 0.0)), 0
                else:
                    unskipped += 1
                    if unskipped == row["scale_window"]:
                        scale, unskipped = min(scale * 2, override.get("max_loss_scale", 2.0**24)), 0
        if not skip:
            for p in held:
                p.grad = total.get(p)
            optimizer.step()
            for weight, master in masters.items():
                weight.data.copy_(master.data)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, weights, [parameter.detach() for parameter in held]
