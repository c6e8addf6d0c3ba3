"""Findings: something that Python does or keeps, and that a replay leaves out."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

PYTHON_STATE: tuple[Kind, ...] = (
    Kind(
        code="GS-Y001",
        title="a number, text or flag of Python changes from run to run",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay runs no Python: the value stays what it was at the capture, and so does everything computed "
        "from it.",
        fix="keep it in a buffer on the device and update that in place, or change it outside of the step",
        broken="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.num_calls += 1  # here
        return self.layer(x) / self.num_calls


model = Model()


def step(x):
    model(x).sum().backward()
""",
        mended="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls.add_(1)
        return self.layer(x) / self.num_calls.clone()


model = Model()


def step(x):
    model(x).sum().backward()
""",
    ),
    Kind(
        code="GS-Y002",
        title="a list, dict or set grows from run to run",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay runs no Python, so nothing is added any more. Tensors that are kept there hold their memory, and "
        "with a gradient the whole history of their step.",
        fix="return the value from the step and collect it outside",
        broken="""
losses = []


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    losses.append(loss.detach())  # here
""",
        mended="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss.detach()
""",
    ),
    Kind(
        code="GS-Y003",
        title="a tensor with a gradient is left in an attribute",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="After a replay it belongs to no graph of autograd: a backward from it reaches nothing, or the step of the "
        "capture. Until then it holds the memory of that step.",
        fix="return it from the module, or detach it if only its value is wanted",
        broken="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.penalty = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.layer(x)
        self.penalty = y.square().mean()  # here
        return y


model = Model()


def step(x):
    (model(x).sum() + model.penalty).backward()
""",
        mended="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y, y.square().mean()


model = Model()


def step(x):
    y, penalty = model(x)
    (y.sum() + penalty).backward()
""",
    ),
    Kind(
        code="GS-Y004",
        title="a tensor is carried from run to run and replaced by another one",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="The graph reads the memory of the tensor that was there at the capture; a replay runs no Python that "
        "would "
        "put the new one in its place. Caches of keys and values that are concatenated are of this kind.",
        fix="allocate it once at its largest size (register_buffer) and write into it (copy_, index_copy_)",
        broken="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), torch.zeros(8, 4)

    def forward(self, x):
        self.state = 0.9 * self.state + x  # here
        return self.layer(self.state)


model = Model()


def step(x):
    model(x).sum().backward()
""",
        mended="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(8, 4))

    def forward(self, x):
        self.state.mul_(0.9).add_(x)
        return self.layer(self.state.clone())


model = Model()


def step(x):
    model(x).sum().backward()
""",
    ),
    Kind(
        code="GS-Y005",
        title="a text is printed or logged in the step",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="A replay runs no Python: the text appears at the capture and never again.",
        fix="print outside of the step, from what it returns",
        broken="""
def step(x):
    print("step on", tuple(x.shape))  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-Y006",
        title="the clock is read in the step",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="A replay runs no Python: the times are those of the capture, and the device has not even begun by then.",
        fix="take the time around the call of the step, or with events of CUDA outside of it",
        broken="""
import time


def step(x):
    begin = time.perf_counter()  # here
    layer(x).sum().backward()
    return begin
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-Y007",
        title="a hook is registered in the step",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay runs no Python, so the hook is neither registered again nor removed; in eager runs there is "
        "one more "
        "of it after every step.",
        fix="register it once, before the first step",
        broken="""
def step(x):
    layer.weight.register_hook(lambda gradient: gradient * 0.5)  # here
    layer(x).sum().backward()
""",
        mended="""
layer.weight.register_hook(lambda gradient: gradient * 0.5)


def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-Y008",
        title="training flags are switched in the step",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay runs no Python: modules keep the flag that they had, and dropout or running statistics of the "
        "capture are used whatever the flag says.",
        fix="call train() or eval() before the step; training and evaluation have graphs of their own",
        broken="""
norm = nn.BatchNorm1d(4)


def step(x):
    norm.train()  # here
    loss = norm(layer(x)).square().mean()
    loss.backward()
    norm.eval()  # here
""",
        mended="""
norm = nn.BatchNorm1d(4)


def step(x):
    loss = norm(layer(x)).square().mean()
    loss.backward()
""",
    ),
)
