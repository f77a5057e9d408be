"""Where the names of ``apex.fp16_utils`` are now: ``lightning_turbo.amp`` at O2 does what they did."""

from __future__ import annotations

from lightning_turbo._checks import refuse_name

__all__: list[str] = []

_INSTEAD = {
    **dict.fromkeys(
        ("FP16_Optimizer", "FP16Model", "network_to_half", "BN_convert_float", "convert_network", "convert_module",
         "prep_param_lists", "model_grads_to_master_grads", "master_params_to_model_params", "tofp16"),
        "lightning_turbo.amp.initialize(model, optimizer, opt_level='O2')",
    ),
    **dict.fromkeys(("LossScaler", "DynamicLossScaler"), "lightning_turbo.ApexGradScaler"),
    "to_python_float": "tensor.item()",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
}  # fmt: skip


def __getattr__(name: str) -> object:
    raise refuse_name("apex.fp16_utils", name, _INSTEAD)
