"""What training does to torch's optimizers."""

import torch

from tetris_sglang.tools.distill.training import InFloat32


def test_muon_steps_alike_in_float32():
    """Not the same step: then torch would no longer be stopped from rounding, and a CPU would take a hundred times as long."""
    torch.manual_seed(0)
    weight, grad = torch.randn(2, 64, 32)
    moves = []
    for in_float32 in (False, True):
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = grad.clone()
        optimizer = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.0)
        if in_float32:
            with InFloat32():
                optimizer.step()
        else:
            optimizer.step()
        moves.append(parameter.detach() - weight)
    rounded, exact = moves
    assert 0 < (rounded - exact).norm() < 0.02 * exact.norm()
