"""Findings: a value of a tensor is wanted on the host."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

_WHY = (
    "The host has to wait for the device to know the value. While a graph is captured nothing is computed yet, so CUDA "
)

HOST_READS: tuple[Kind, ...] = (
    Kind(
        code="GS-H001",
        title="a number is read from a tensor",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses; and a number that was read becomes a constant of the graph.",
        fix="keep the value in a tensor, or return it detached and read it after the step",
        broken="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return {"loss": loss.item()}  # here
""",
        mended="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return {"loss": loss.detach()}
""",
    ),
    Kind(
        code="GS-H002",
        title="Python branches on a tensor",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses; and a replay runs no Python, so it could only ever take the branch of the capture.",
        fix="compute both sides and choose with torch.where, or multiply by a mask",
        broken="""
def step(x):
    y = layer(x)
    if y.abs().max() > 1:  # here
        y = y / 2
    y.sum().backward()
""",
        mended="""
def step(x):
    y = layer(x)
    y = torch.where(y.abs().max() > 1, y / 2, y)
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-H003",
        title="a tensor is printed or put into a text",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses. A logger that swallows the error leaves a capture that is lost without a word.",
        fix="return the tensor detached and print it after the step",
        broken="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return f"loss {loss}"  # here
""",
        mended="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss.detach()
""",
    ),
    Kind(
        code="GS-H004",
        title="a tensor is copied to the host",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses the wait for the copy; what the host computes from it is not a part of the graph.",
        fix="compute with torch on the device, or copy after the step",
        broken="""
def step(x):
    y = layer(x)
    weights = 1 / y.detach().cpu().abs().sum(0)  # here
    (y * weights).sum().backward()
""",
        mended="""
def step(x):
    y = layer(x)
    weights = 1 / y.detach().abs().sum(0)
    (y * weights).sum().backward()
""",
    ),
    Kind(
        code="GS-H005",
        title="a tensor is turned into a Python list",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses. Sizes of splits and loops over the list would be those of the capture for ever.",
        fix="keep sizes fixed (pad to a capacity), and index with tensors",
        broken="""
def step(x):
    counts = F.one_hot(x.argmax(-1), 4).sum(0).tolist()  # here
    sum(part.sum() for part in layer(x).split(counts)).backward()
""",
        mended="""
def step(x):
    chosen = F.one_hot(x.argmax(-1), 4).to(x.dtype)
    (chosen.t() @ layer(x)).sum().backward()
""",
    ),
    Kind(
        code="GS-H006",
        title="a tensor is built from a list of tensors, value by value",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses: torch.tensor reads every entry, and copies the list to the device.",
        fix="use torch.stack or torch.cat",
        broken="""
def step(x):
    y = layer(x)
    losses = torch.tensor([y.mean(), y.var()])  # here
    y.sum().backward()
    return losses
""",
        mended="""
def step(x):
    y = layer(x)
    losses = torch.stack([y.mean(), y.var()]).detach()
    y.sum().backward()
    return losses
""",
    ),
    Kind(
        code="GS-H007",
        title="NaN or infinity is looked for on the host",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses; a replay would never look again.",
        fix="add up a flag on the device and read it every K steps after a replay, as --deferred-nan-check does",
        broken="""
def step(x):
    loss = layer(x).square().mean()
    if torch.isnan(loss):  # here
        raise ValueError("the loss is NaN")
    loss.backward()
""",
        mended="""
class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer
        self.register_buffer("num_bad", torch.zeros(()))

    def forward(self, x):
        loss = self.layer(x).square().mean()
        self.num_bad.add_((~loss.detach().isfinite()).float())
        return loss


model = Checked()


def step(x):
    model(x).backward()
""",
    ),
    Kind(
        code="GS-H008",
        title="tensors are compared on the host",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses: torch.equal and torch.allclose answer with a flag of Python.",
        fix="use (a == b).all(), which stays a tensor, or compare after the step",
        broken="""
def step(x):
    y = layer(x)
    same = torch.equal(y, x)  # here
    y.sum().backward()
    return same
""",
        mended="""
def step(x):
    y = layer(x)
    same = (y == x).all()
    y.sum().backward()
    return same
""",
    ),
    Kind(
        code="GS-H009",
        title="a tensor is saved or copied deeply",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses; a replay saves nothing.",
        fix="save after the step; clone() keeps a copy on the device",
        broken="""
import copy


def step(x):
    y = layer(x)
    before = copy.deepcopy(y.detach())  # here
    (y - before + y).sum().backward()
""",
        mended="""
def step(x):
    y = layer(x)
    before = y.detach().clone()
    (y - before + y).sum().backward()
""",
    ),
    Kind(
        code="GS-H010",
        title="the host waits for the device",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="CUDA refuses to wait while it captures; outside of a capture each wait leaves the device idle.",
        fix="leave it out, or wait after the step; streams wait for each other with wait_stream",
        broken="""
def step(x):
    layer(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-H011",
        title="an operation reads values of its arguments",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "refuses. The operation looks like any other, but its kernel is started only after such a read.",
        fix="give the sizes as numbers (num_classes=, a list of positions), or use another operation",
        broken="""
def step(x):
    labels = x.argmax(-1)
    (F.one_hot(labels) * 1.0).sum()  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    labels = x.argmax(-1)
    (F.one_hot(labels, 4) * 1.0).sum()
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-H012",
        title="the forward can be captured, and the backward reads values",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="The gradient of a product has to know where there are zeros: the kernel of a GPU asks the host, which "
        "CUDA refuses in a capture. The one of the CPU need not show it.",
        fix="compute it from logarithms (x.log().sum().exp()), or multiply the factors one by one",
        broken="""
def step(x):
    y = F.softplus(layer(x)).prod(1)  # here
    y.sum().backward()
""",
        mended="""
def step(x):
    y = F.softplus(layer(x)).log().sum(1).exp()
    y.sum().backward()
""",
    ),
)
