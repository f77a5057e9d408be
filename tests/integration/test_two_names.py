"""Both import names of Lightning are served, whichever is imported first; a mismatch is told in words."""

import os
import subprocess
import sys
import textwrap

import pytest

FIT = """
import torch, warnings
warnings.simplefilter("ignore")

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(accelerator="cpu", max_epochs=1, plugins=[lightning_turbo.ApexAMP("O2")], logger=False,
                     strategy="turbo", callbacks=[lightning_turbo.GradToNone()], enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2)))
print("trained under", type(trainer).__module__.split(".trainer")[0], type(trainer.strategy).__name__)
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**{k: v for k, v in os.environ.items() if k != "LIGHTNING_TURBO_LIGHTNING"}, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("first", ["lightning", "turbo"])
def test_either_name_is_served_whichever_comes_first(name, first):
    imports = [f"import {name} as pl", "import lightning_turbo"]
    code = "\n".join(imports if first == "lightning" else imports[::-1]) + FIT
    status, out, err = run(code)
    assert status == 0, err
    assert f"trained under {name} TurboStrategy" in out


def test_a_name_taken_before_the_other_lightning_is_explained():
    code = "from lightning_turbo import ApexAMP\nimport lightning_turbo\nimport pytorch_lightning as pl\n" + FIT
    status, _, err = run(code)
    assert status == 1
    assert "ApexAMP is built on lightning.pytorch, because no Lightning was imported before it" in err
    assert "this program uses pytorch_lightning" in err
    assert "lightning_turbo.bind_lightning('pytorch_lightning')" in err
    status, out, err = run(code, LIGHTNING_TURBO_LIGHTNING="pytorch_lightning")
    assert status == 0, err
    assert "trained under pytorch_lightning" in out


def test_binding_by_hand_and_its_refusals():
    code = textwrap.dedent("""
        import lightning_turbo
        try:
            lightning_turbo.bind_lightning("lightning")
        except ValueError as error:
            print(error)
        lightning_turbo.bind_lightning("pytorch_lightning")
        from lightning_turbo import ApexAMP
        print(ApexAMP.__mro__[1].__module__)
        try:
            lightning_turbo.bind_lightning("lightning.pytorch")
        except TypeError as error:
            print(error)
    """)
    status, out, err = run(code)
    assert status == 0, err
    assert "'lightning' is no import name of Lightning; accepted are 'lightning.pytorch' and" in out
    assert "pytorch_lightning.plugins.precision.precision" in out
    assert "lightning_turbo is bound to pytorch_lightning already, because bind_lightning was called" in out
