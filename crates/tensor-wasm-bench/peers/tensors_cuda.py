"""PyTorch on a GPU, measured on request: a line `NAME MILLISECONDS` on stdin is answered by a line with the median time
of one run in nanoseconds, or `none`. The name says which: `add/4096` as it is, `add/4096@compile` by `torch.compile`.
Runs are sent one after the other, and waited for together. `compare tensors-cuda` starts this."""

import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Sent before anybody waits.
BATCH = 40


class Decoder(torch.nn.Module):
    """One token after the other, with a cache of fixed size: that of `src/decode.rs`."""

    WIDTH, HEADS, LAYERS, TOKENS, CONTEXT = 512, 8, 4, 1024, 512

    def __init__(self):
        super().__init__()
        nn, w = torch.nn, self.WIDTH
        self.tokens, self.places = nn.Embedding(self.TOKENS, w), nn.Embedding(self.CONTEXT, w)
        block = lambda: nn.ModuleList(
            [nn.LayerNorm(w), nn.Linear(w, 3 * w), nn.Linear(w, w), nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.Linear(4 * w, w)]
        )
        self.blocks = nn.ModuleList([block() for _ in range(self.LAYERS)])
        self.norm, self.head = nn.LayerNorm(w), nn.Linear(w, self.TOKENS)
        sizes = (self.LAYERS, 1, self.HEADS, self.CONTEXT, w // self.HEADS)
        self.register_buffer("keys", torch.zeros(sizes))
        self.register_buffer("values", torch.zeros(sizes))

    def forward(self, token, position):
        x = self.tokens(token) + self.places(position)
        seen = torch.arange(self.CONTEXT, device=x.device) <= position
        for n, (first, project, merge, second, widen, narrow) in enumerate(self.blocks):
            q, k, v = project(first(x)).view(1, 1, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
            self.keys[n].index_copy_(2, position, k)
            self.values[n].index_copy_(2, position, v)
            made = F.scaled_dot_product_attention(q, self.keys[n], self.values[n], attn_mask=seen[None, None, None])
            x = x + merge(made.transpose(1, 2).reshape(1, 1, -1))
            x = x + narrow(F.gelu(widen(second(x))))
        return self.head(self.norm(x)).argmax(-1)


def rows():
    torch.manual_seed(1)
    rand = lambda *sizes, dtype=torch.float32: torch.randn(*sizes, device="cuda", dtype=dtype)
    a, b = rand(4096, 4096), rand(4096, 4096)
    s, t = rand(256, 256), rand(256, 256)
    small = rand(4096, 10)
    h, g, bias = rand(4096, 4096, dtype=torch.bfloat16), rand(4096, 4096, dtype=torch.bfloat16), rand(4096, dtype=torch.bfloat16)
    wide = rand(8192, 4096, dtype=torch.bfloat16)
    wide_to, a_to = torch.empty_like(wide), torch.empty_like(a)
    q, k, v = (rand(16, 4096, 128, dtype=torch.bfloat16) for _ in range(3))
    million, long = rand(1_000_000), rand(16 << 20)
    words, rows_gradient = torch.randint(0, 10_000, (50_000,), device="cuda"), rand(50_000, 256)
    weights, gradient = rand(10_000_000), rand(10_000_000)
    weights.requires_grad_(True)
    weights.grad = gradient
    adam = torch.optim.Adam([weights], lr=0.001, fused=True)
    model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).cuda()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = rand(64, 784), torch.randint(0, 10, (64,), device="cuda")

    def mlp_step():
        sgd.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        sgd.step()

    decoder = Decoder().cuda()
    state = {"token": torch.zeros(1, 1, dtype=torch.int64, device="cuda"), "at": 0}
    positions = [torch.tensor([n], device="cuda") for n in range(Decoder.CONTEXT)]

    def decode(model):
        def step():
            with torch.no_grad():
                state["token"] = model(state["token"], positions[state["at"]]).clone()
            state["at"] = (state["at"] + 1) % Decoder.CONTEXT

        return step

    def attention(backend):
        with sdpa_kernel(backend), torch.no_grad():
            return F.scaled_dot_product_attention(q[None], k[None], v[None])

    def tf32():
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return {
        "add/4096": lambda: a + b,
        "relu/4096": lambda: torch.relu(a),
        "transpose/4096": lambda: a.t().contiguous(),
        "sum/4096": lambda: a.sum(),
        "copy/4096": lambda: a_to.copy_(a),
        "copy/8192x4096": lambda: wide_to.copy_(wide),
        "add/256": lambda: s + t,
        "sum/256": lambda: s.sum(),
        "softmax/256": lambda: torch.softmax(s, 1),
        "matmul/256": lambda: s @ t,
        "log_softmax/4096x10": lambda: torch.log_softmax(small, 1),
        "log_softmax_to_host/4096x10": lambda: torch.log_softmax(small, 1).cpu(),
        "argmax/4096": lambda: a.argmax(1),
        "argsort/1M": lambda: torch.argsort(million, stable=True),
        "cumsum/16M": lambda: long.cumsum(0),
        "embedding_gradient/50k": lambda: torch.ops.aten.embedding_dense_backward(rows_gradient, words, 10_000, -1, False),
        "matmul/4096/f32": lambda: a @ b,
        "matmul/4096/tf32": tf32,
        "matmul/4096/bf16": lambda: h @ g,
        "matmul_bias_gelu/4096/bf16": lambda: F.gelu(torch.addmm(bias, h, g)),
        "chain6/4096": lambda: torch.relu((a * 2 + 1) * a - 1) * 0.5,
        "softmax/8192x4096": lambda: torch.softmax(wide, 1),
        "layer_norm/8192x4096": lambda: F.layer_norm(wide, (4096,)),
        "attention_math/16x4096x128": lambda: attention(SDPBackend.MATH),
        "attention_flash/16x4096x128": lambda: attention(SDPBackend.FLASH_ATTENTION),
        "adam/10M": adam.step,
        "mlp_step": mlp_step,
        "decode/4x512": decode(decoder),
        # Replayed as a graph: the model is compiled, not what keeps its state.
        "decode/4x512@compile": decode(torch.compile(decoder, mode="reduce-overhead")),
    }


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    known, compiled = rows(), {}
    print("ready", flush=True)
    for line in sys.stdin:
        asked, milliseconds = line.split()
        name, _, how = asked.partition("@")
        run = known.get(asked, known.get(name))
        if run is None:
            print("none", flush=True)
            continue
        if how == "compile" and asked not in known:
            run = compiled.setdefault(name, torch.compile(run))
        batch = 1 if "to_host" in name else BATCH
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        times, until = [], time.perf_counter() + int(milliseconds) / 1e3
        while time.perf_counter() < until or len(times) < 3:
            begun = time.perf_counter_ns()
            for _ in range(batch):
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter_ns() - begun) / batch)
        print(sorted(times)[len(times) // 2], flush=True)


main()
