"""Findings: weights, buffers and gradients that move, go stale or are written at the wrong time."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

WEIGHTS: tuple[Kind, ...] = (
    Kind(
        code="GS-W001",
        title="a parameter is replaced or gets other memory",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="The graph reads and writes the memory that the parameter had at the capture; the allocator gives that to "
        "something else, so the numbers are wrong and no error tells.",
        fix="write into the parameter under torch.no_grad() (copy_, mul_), or replace it before the capture",
        broken="""
def step(x):
    layer(x).sum().backward()
    layer.weight.data = layer.weight.data * 0.99  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.mul_(0.99)
""",
    ),
    Kind(
        code="GS-W002",
        title="a parameter is written in the forward",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="Layers that are captured together are launched at once, and a recomputed forward writes again: the "
        "weights "
        "that a backward uses may not be those of its forward.",
        fix="write into weights after the backward, or compute the changed weight without keeping it",
        broken="""
def step(x):
    with torch.no_grad():
        layer.weight.clamp_(-1, 1)  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.clamp_(-1, 1)
""",
    ),
    Kind(
        code="GS-W003",
        title="a buffer is replaced by another tensor",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="The graph reads the memory that the buffer had at the capture; a replay runs no Python that would put "
        "the new "
        "tensor in its place.",
        fix="write into the buffer (copy_, add_)",
        broken="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # here
        return self.layer(x - self.mean)


model = Model()


def step(x):
    model(x).sum().backward()
""",
        mended="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean)


model = Model()


def step(x):
    model(x).sum().backward()
""",
    ),
    Kind(
        code="GS-W004",
        title="a tensor that was computed from a weight goes stale",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="The weight changes with each update, or when weights are loaded; the copy that was made of it before "
        "(cast, "
        "transposed, packed) does not, and the graph reads the copy.",
        fix="compute it in the step, or write it anew into the same memory after each change of the weight",
        broken="""
transposed = layer.weight.detach().t().contiguous()


def step(x):
    y = x @ transposed  # here
    (y + layer(x)).sum().backward()
""",
        mended="""
def step(x):
    y = x @ layer.weight.detach().t()
    (y + layer(x)).sum().backward()
""",
    ),
    Kind(
        code="GS-W005",
        title="a tensor from outside of the modules is written in place",
        severity=Severity.note,
        effect=Effect.silently_wrong,
        why="A replay writes again, so it adds up with each one; whoever prepares it for a step has to do so before "
        "each "
        "replay, and runs for warmup count too unless they are undone.",
        fix="nothing, if it is to add up; else make the result a new tensor, or keep it as a buffer of a module",
        broken="""
lengths = torch.zeros(8)


def step(x):
    lengths.add_(1)  # here
    (layer(x) * lengths[:, None]).sum().backward()
""",
        mended="""
lengths = torch.zeros(8)


def step(x):
    longer = lengths + 1
    (layer(x) * longer[:, None]).sum().backward()
""",
    ),
    Kind(
        code="GS-W006",
        title="a recomputed forward writes a buffer again",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="The forward runs twice, once in the backward: what it adds to a buffer counts twice. Capturing repeats "
        "that.",
        fix="update the buffer outside of the recomputed part",
        broken="""
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("num_tokens", torch.zeros(()))

    def forward(self, x):
        self.num_tokens.add_(x.shape[0])  # here
        return self.layer(x)


model = Model()


def step(x):
    checkpoint(model, x, use_reentrant=False).sum().backward()
""",
        mended="""
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("num_tokens", torch.zeros(()))

    def forward(self, x):
        self.num_tokens.add_(x.shape[0])
        return checkpoint(self.layer, x, use_reentrant=False)


model = Model()


def step(x):
    model(x).sum().backward()
""",
    ),
    Kind(
        code="GS-W007",
        title="the step writes into its batch",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay works on copies of the arguments at fixed addresses: what it writes there does not reach the "
        "caller.",
        fix="write into a clone, and return what the caller is to see",
        broken="""
def step(x):
    x.mul_(2)  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    x = x * 2
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-W008",
        title="a module with parameters is called and belongs to no module",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="It lies in a list, a closure or a function, or is made anew in each run: parameters() and "
        "named_modules() do "
        "not find it, so it gets no graph, is not moved and not trained.",
        fix="assign it to an attribute of the module, or use nn.ModuleList or nn.ModuleDict",
        broken="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        for inner in self.layers:
            x = inner(x)  # here
        return self.head(x)


model = Model()


def step(x):
    model(x).sum().backward()
""",
        mended="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for inner in self.layers:
            x = inner(x)
        return self.head(x)


model = Model()


def step(x):
    model(x).sum().backward()
""",
    ),
    Kind(
        code="GS-W009",
        title="a gradient is replaced by another tensor",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="The graph of a backward adds to the memory that .grad had, and the optimizer reads the memory that it "
        "has: "
        "where they are captured apart these are no longer the same.",
        fix="write into the gradient (parameter.grad.mul_(...))",
        broken="""
def step(x):
    layer(x).sum().backward()
    for parameter in layer.parameters():
        parameter.grad = parameter.grad * 0.5  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
    for parameter in layer.parameters():
        parameter.grad.mul_(0.5)
""",
    ),
    Kind(
        code="GS-W010",
        title="the history of a backward is kept",
        severity=Severity.warning,
        effect=Effect.memory,
        why="retain_graph=True keeps everything that the forward saved until the loss is gone; in a graph all of that "
        "memory is reserved for good.",
        fix="leave retain_graph out; add losses up and call backward once",
        broken="""
def step(x):
    y = layer(x)
    y.mean().backward(retain_graph=True)  # here
    y.var().backward()
""",
        mended="""
def step(x):
    y = layer(x)
    (y.mean() + y.var()).backward()
""",
    ),
    Kind(
        code="GS-W011",
        title="gradients are filled with zeros",
        severity=Severity.note,
        effect=Effect.slow,
        why="set_to_none=False writes zeros into every gradient, and the backward then reads and adds to them.",
        fix="leave set_to_none out: gradients are made anew, in a graph at the same address each time",
        broken="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad(set_to_none=False)  # here
    layer(x).sum().backward()
    optimizer.step()
""",
        mended="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
""",
    ),
)
