"""Gradients that lie in parts: their norm, their values, overflows on one rank."""

from collections import OrderedDict

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from leyden import Module
from leyden.plugins.precision.mixed import MixedPrecision
from leyden.strategies.clipping import clip_grad_norm
from leyden.testing import on_ranks, quiet_trainer


def net():
    torch.manual_seed(0)
    layers = {"up": nn.Linear(5, 6), "down": nn.Linear(6, 3), "rest": nn.Linear(3, 3)}
    return nn.Sequential(OrderedDict(layers)).double()


def gradients(model, norm_type):
    """Return fixed gradients by name whose joint norm is 10."""
    torch.manual_seed(1)
    found = {name: torch.randn(p.shape).double() for name, p in model.named_parameters()}
    del found["rest.bias"]  # a parameter without
    flat = torch.cat([g.flatten() for g in found.values()])
    factor = 10 / torch.linalg.vector_norm(flat, norm_type)
    return {name: g * factor for name, g in found.items()}


def clipped(layout, norm_type):
    """Return the norm and how far from a tenth of itself each gradient is."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    wanted = gradients(model, norm_type)
    if layout == "tensor-split":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if layout == "tensor-split":
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "all but one":
        fully_shard(model, ignored_params={*model.down.parameters()})
    elif layout == "all":
        fully_shard(model)
    for name, parameter in model.named_parameters():
        if name not in wanted:
            continue
        gradient = wanted[name]
        if isinstance(parameter, DTensor):
            template = torch.zeros_like(parameter)
            (chunk,) = template.__create_chunk_list__()
            at = zip(chunk.offsets, chunk.sizes, strict=True)
            template.to_local().copy_(gradient[tuple(slice(o, o + s) for o, s in at)])
            gradient = template
        parameter.grad = gradient.clone()
    norm = clip_grad_norm(model.parameters(), 1.0, norm_type, torch.device("cpu"))
    assert not isinstance(norm, DTensor)
    far = [
        (whole(p.grad) - wanted[name] / 10).abs().max().item()
        for name, p in model.named_parameters()
        if name in wanted
    ]
    dist.destroy_process_group()
    return norm.item(), max(far)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("layout", ["none", "all", "all but one", "tensor-split"])
def test_the_norm_is_that_of_all_parts_however_they_lie(layout, norm_type):
    """PL #19235, PT #180346: local norms, or a crash where parts lie on different meshes."""
    for norm, far in on_ranks(4, clipped, layout, norm_type):
        assert norm == pytest.approx(10, rel=1e-12)
        assert far < 1e-6  # the usual 1e-6 is added to the norm


def of_terms():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    value = torch.tensor([3.0, 0, 0, 0]) if dist.get_rank() else torch.tensor([0, 4.0, 0, 0])
    parameter.grad = DTensor.from_local(value, mesh, [Partial()])
    sharded = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))  # uneven
    norm = clip_grad_norm([parameter, sharded], 1.0, 2.0, torch.device("cpu"))
    result = norm.item(), parameter.grad.full_tensor().norm().item()
    dist.destroy_process_group()
    return result


def test_terms_of_a_sum_are_summed_first_and_a_missing_gradient_counts_nothing():
    for norm, after in on_ranks(2, of_terms):
        assert norm == pytest.approx(5)
        assert after == pytest.approx(1, rel=1e-5)


class Overflows(Module):
    """Rank 1's part of one gradient is infinite in the second batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).square().mean()

    def on_after_backward(self):
        if self.global_step == 1 and self.trainer.global_rank == 1 and not self.seen:
            self.seen = True
            self.second.weight.grad.to_local().fill_(torch.inf)

    seen = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def overflowing():
    module = Overflows()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = quiet_trainer(
        accelerator="cpu", devices=2, strategy="fsdp", gradient_clip_val=1.0,
        precision=MixedPrecision(torch.float16, scaler),
    )  # fmt: skip
    trainer.fit(module, [torch.ones(2, 4)] * 4)
    finite = all(bool(p.full_tensor().isfinite().all()) for p in module.parameters())
    return trainer.global_step, trainer.state.skipped, finite, trainer.precision_plugin.state_dict()


def test_an_overflow_in_one_ranks_part_is_skipped_by_all():
    first, second = on_ranks(2, overflowing)
    assert first == second
    assert first[:3] == (3, 1, True)
    assert first[3]["scale"] == 512


class Limited(Overflows):
    def on_after_backward(self):
        """Leave gradients as they are."""

    def on_before_zero_grad(self, optimizer):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.largest = max([g.full_tensor().abs().max().item() for g in grads], default=0)


def by_value():
    module = Limited()
    trainer = quiet_trainer(
        accelerator="cpu", devices=2, strategy="fsdp", gradient_clip_val=1e-3,
        gradient_clip_algorithm="value",
    )  # fmt: skip
    trainer.fit(module, [torch.ones(2, 4)] * 2)
    return module.largest


def test_values_of_parts_are_clipped():
    assert on_ranks(2, by_value) == [pytest.approx(1e-3)] * 2
