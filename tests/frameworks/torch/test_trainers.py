"""Trainers of other packages, with the lines that docs/pytorch.md gives. Skipped, visibly, where they are missing."""

from __future__ import annotations

import pytest
import torch

import psclient.torch as pst
from tests.kit.modules import apart, job, mlp, values

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers[torch]"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install transformers[torch]")


class Regression(torch.nn.Module):
    """A model as `transformers.Trainer` takes it: returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(torch.float32)

    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}


def arguments(path):
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(str(path), num_train_epochs=2, max_grad_norm=0.0, **quiet)


def test_trainer_of_transformers_trains_on_servers(tmp_path):
    """With a `pst.Optimizer`, a `pst.Loader` and without its clipping it takes the steps that it takes alone."""

    source = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(5, generator=source), "labels": torch.ones(3)} for _ in range(40)]

    def work(strategy, worker):
        model = Regression()
        optimizer = pst.Optimizer(model, torch.optim.AdamW, lr=0.01, strategy=strategy)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

        class Trainer(transformers.Trainer):
            def get_train_dataloader(self):
                return pst.Loader(super().get_train_dataloader(), optimizer)

        trainer = Trainer(model, arguments(tmp_path), train_dataset=data, optimizers=(optimizer, scheduler))
        trainer.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(0.0)
        assert trainer.train().global_step == optimizer.state_dict()["iterations"] == 10
        return values(model)

    alone = Regression()
    own = torch.optim.AdamW(alone.parameters(), lr=0.01)
    pair = (own, torch.optim.lr_scheduler.StepLR(own, 3))
    transformers.Trainer(alone, arguments(tmp_path), train_dataset=data, optimizers=pair).train()
    assert apart(job(work)[0], alone) < 1e-6
