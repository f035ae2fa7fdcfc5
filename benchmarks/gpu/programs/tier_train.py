"""Trains a small network of a given size in PyTorch: `tier_train.py DEVICE STEPS BYTES...`, for any Python.

Prints {"missing": ...} where PyTorch is not installed. Otherwise prints one object per size: time of a step, losses,
sums of the data that stays from step to step, and PyTorch's memory from the driver. It needs only PyTorch. DEVICE:
cuda, or cpu to try the program itself.
"""

import importlib.util
import json
import sys
import time

WIDTH, ROWS = 1024, 1024
FLOAT = 4
STATES = 4  # a weight, its gradient, and the two moments of Adam
KEPT = 2  # per layer and row, for the backward pass: inputs of the product and of the activation
WARM = 2  # steps without a time: the optimizer makes its state in the first step
RATE = 1e-3
SEED = 7


def layers_of(size):
    """Number of layers for a training of about this many bytes; at least one."""
    weights = WIDTH * WIDTH + WIDTH
    return max(1, round(size / (FLOAT * (STATES * weights + KEPT * ROWS * WIDTH))))


def network(torch, layers):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.product = torch.nn.Linear(WIDTH, WIDTH)
            self.activation = torch.nn.GELU()

        def forward(self, rows):
            return rows + self.activation(self.product(rows)) / layers

    return torch.nn.Sequential(*(Block() for _ in range(layers)))


def train(torch, device, steps, size):
    """Several steps of Adam that teach the network to double its input."""
    torch.manual_seed(SEED)
    model = network(torch, layers_of(size)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    rows = torch.randn(ROWS, WIDTH).to(device)
    losses, took = [], []
    for _ in range(WARM + steps):
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
        loss = torch.nn.functional.mse_loss(model(rows), 2 * rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the card
        took.append(time.perf_counter() - begun)
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    timed = sorted(took[WARM:])
    return {
        "layers": len(model), "step_s": timed[len(timed) // 2], "losses": losses, "reserved": reserved,
        "sums": sums(torch, model, optimizer),
    }  # fmt: skip


def sums(torch, model, optimizer):
    """Sums of the magnitudes of all data that the training keeps: lost or overwritten memory changes a sum."""
    kept = []
    for weight in model.parameters():
        state = optimizer.state[weight]
        kept += [weight.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.abs().sum(dtype=torch.float64).item() for tensor in kept]


def main():
    if importlib.util.find_spec("torch") is None:
        say(missing="torch")
        return
    import torch

    device, steps, *sizes = sys.argv[1], *map(int, sys.argv[2:])
    if device == "cuda" and not torch.version.cuda:
        say(missing="PyTorch is built without CUDA")
        return
    for size in sizes:
        try:
            say(version=torch.__version__, bytes=size, **train(torch, device, steps, size))
        except torch.cuda.OutOfMemoryError as error:
            say(version=torch.__version__, bytes=size, refused=str(error)[:200])
        if device == "cuda":
            torch.cuda.empty_cache()


def say(**what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
