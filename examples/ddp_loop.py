"""Several processes, each with its part of a batch. Run: ``torchrun --nproc-per-node 2 examples/ddp_loop.py``."""

import os
from functools import partial

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import CAGrad

LOSS = {"sum": nn.functional.mse_loss, "sign": nn.functional.cross_entropy}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"sum": nn.Linear(64, 1), "sign": nn.Linear(64, 2)})

    def forward(self, x, tasks):
        z = self.encoder(x)
        return {task: self.heads[task](z) for task in tasks}


def losses(model, batch, tasks):  # through the wrapper or not: a step puts it aside
    return {task: LOSS[task](output, batch[task]) for task, output in model(batch["x"], tasks).items()}


def train(rank: int, ranks: int, device: torch.device, epochs: int = 5) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(32, 10) for _ in range(20)]
    batches = [{"x": x, "sum": x.sum(1, keepdim=True), "sign": (x[:, 0] * x[:, 1] > 0).long()} for x in inputs]
    loader = [{name: t[rank::ranks].to(device) for name, t in batch.items()} for batch in batches]
    model = TwoHeads().to(device)
    model = DistributedDataParallel(model) if ranks > 1 else model
    parameters = split_parameters(model, partial(losses, model, loader[0]), list(LOSS))
    mtl = FlatMTL(CAGrad(), SAM(rho=0.05))  # the process group is that of the wrapper
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(1, epochs + 1):
        monitor = Monitor()
        for batch in loader:
            optimizer.zero_grad()
            monitor.update(mtl.backward(partial(losses, model, batch), parameters))
            optimizer.step()
        if rank == 0:  # the results of a step are those of all ranks
            means = monitor.compute()
            print(f"epoch {epoch}", *(f"{name} {means[name]:.4f}" for name in ("loss/sum", "loss/sign", "conflict")))


if __name__ == "__main__":
    rank, ranks, local = (int(os.environ.get(k, "0")) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))  # 0: no torchrun
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(rank, max(ranks, 1), device)
    if ranks > 1:  # a process that leaves without these two may abort: threads of the group may still hold tensors
        distributed.barrier()
        distributed.destroy_process_group()
