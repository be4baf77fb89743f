"""NumPy and PyTorch, measured on request: a line `NAME MILLISECONDS` on stdin is answered by a line with the median
time of one run in nanoseconds, or `none` where the library has no such thing. `compare tensors` starts this."""

import os
import sys
import time

import numpy as np

THREADS = os.cpu_count()


def numpy_rows():
    rng = np.random.default_rng(1)
    rand = lambda *sizes: rng.random(sizes, dtype=np.float32)
    rows = {}
    for n in (256, 1024, 4096):
        a, b, c = rand(n, n), rand(n, n), rand(n, 10)
        rows |= {
            f"matmul/{n}": lambda a=a, b=b: a @ b,
            f"add/{n}": lambda a=a, b=b: a + b,
            f"sub/{n}": lambda a=a, b=b: a - b,
            f"mul/{n}": lambda a=a, b=b: a * b,
            f"div/{n}": lambda a=a, b=b: a / b,
            f"relu/{n}": lambda a=a: np.maximum(a, 0),
            f"sum/{n}": lambda a=a: a.sum(),
            f"mean/{n}": lambda a=a: a.mean(),
            f"sum_axis0/{n}": lambda a=a: a.sum(0),
            f"sum_axis1/{n}": lambda a=a: a.sum(1),
            f"mean_axis0/{n}": lambda a=a: a.mean(0),
            f"mean_axis1/{n}": lambda a=a: a.mean(1),
            f"transpose/{n}": lambda a=a: np.ascontiguousarray(a.T),
            f"log_softmax/{n}x10": lambda c=c: (lambda s: s - np.log(np.exp(s).sum(1, keepdims=True)))(
                c - c.max(1, keepdims=True)
            ),
        }
    a, b = rand(4096, 4096), rand(4096, 4096)
    out = np.empty_like(a)
    rows["copy/4096"] = lambda: np.copyto(out, a)
    rows["chain6/4096"] = lambda: np.maximum((a * 2 + b) * a - 1, 0) * np.float32(0.5)
    x, w = rand(64, 784), rand(784, 128)
    rows["matmul/64x784x128"] = lambda: x @ w
    return rows


def torch_rows():
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    rows = {}
    for n in (256, 1024, 4096):
        a, b, c = torch.rand(n, n), torch.rand(n, n), torch.rand(n, 10)
        rows |= {
            f"matmul/{n}": lambda a=a, b=b: a @ b,
            f"add/{n}": lambda a=a, b=b: a + b,
            f"sub/{n}": lambda a=a, b=b: a - b,
            f"mul/{n}": lambda a=a, b=b: a * b,
            f"div/{n}": lambda a=a, b=b: a / b,
            f"relu/{n}": lambda a=a: torch.relu(a),
            f"sum/{n}": lambda a=a: a.sum(),
            f"mean/{n}": lambda a=a: a.mean(),
            f"sum_axis0/{n}": lambda a=a: a.sum(0),
            f"sum_axis1/{n}": lambda a=a: a.sum(1),
            f"mean_axis0/{n}": lambda a=a: a.mean(0),
            f"mean_axis1/{n}": lambda a=a: a.mean(1),
            f"transpose/{n}": lambda a=a: a.t().contiguous(),
            f"log_softmax/{n}x10": lambda c=c: torch.log_softmax(c, 1),
        }
    a, b = torch.rand(4096, 4096), torch.rand(4096, 4096)
    out = torch.empty_like(a)
    rows["copy/4096"] = lambda: out.copy_(a)
    rows["chain6/4096"] = lambda: torch.relu((a * 2 + b) * a - 1) * 0.5
    x, w = torch.rand(64, 784), torch.rand(784, 128)
    rows["matmul/64x784x128"] = lambda: x @ w
    images, filters = torch.rand(32, 1, 28, 28), torch.rand(16, 1, 5, 5)
    rows["conv2d/32x1x28x28"] = lambda: F.conv2d(images, filters)
    maps = torch.rand(32, 16, 24, 24)
    rows["max_pool2d/32x16x24x24"] = lambda: F.max_pool2d(maps, 2)
    wide = torch.rand(4096, 1024)
    rows["softmax/4096x1024"] = lambda: torch.softmax(wide, 1)
    rows["layer_norm/4096x1024"] = lambda: F.layer_norm(wide, (1024,))
    one = torch.tensor(1.0)
    rows["scalar"] = lambda: (one + 1.0).item()

    def trainer(model, inputs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        targets = torch.randint(0, 10, (inputs.shape[0],))

        def step():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step

    nn = torch.nn
    mlp = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    rows["mlp_step"] = trainer(mlp, torch.rand(64, 784))
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 10),
    )
    rows["cnn_step"] = trainer(cnn, torch.rand(64, 1, 28, 28))
    weights = torch.rand(10_000_000, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=0.001, fused=True)
    weights.grad = torch.rand(10_000_000)
    rows["adam/10M"] = adam.step
    q, k, v = (torch.rand(8, 512, 64, requires_grad=True) for _ in range(3))

    def attention():
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    rows["attention/8x512x64"] = attention
    return rows


def median(run, milliseconds):
    run()
    times, until = [], time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until or len(times) < 3:
        begun = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begun)
    return sorted(times)[len(times) // 2]


def main():
    make = {"numpy": numpy_rows, "torch": torch_rows}[sys.argv[1]]
    rows, last = make(), None
    print("ready", flush=True)
    for line in sys.stdin:
        name, milliseconds = line.split()
        # Fresh memory for each row: `compare` says why. A copy is measured in between.
        if name != last and name != "copy/4096" and name in rows:
            rows, last = None, name
            rows = make()
        print(median(rows[name], float(milliseconds)) if name in rows else "none", flush=True)


main()
