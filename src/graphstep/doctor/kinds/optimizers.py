"""Findings: the optimizer step."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

OPTIMIZERS: tuple[Kind, ...] = (
    Kind(
        code="GS-O001",
        title="the optimizer cannot be captured as it was built",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="It keeps its learning rate or its number of steps on the host: torch refuses the capture, and where it "
        "does "
        "not, every replay repeats the numbers of the capture.",
        fix="build it with fused=True or capturable=True, or step after the captured function",
        broken="""
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()  # here
""",
        mended="""
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
""",
    ),
    Kind(
        code="GS-O002",
        title="the learning rate is changed in the step",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A scheduler is Python: a replay does not run it, and the rate stays that of the capture.",
        fix="call scheduler.step() after the step; graph_step reads the rates before each replay",
        broken="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    scheduler.step()  # here
""",
        mended="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # scheduler.step() follows the call of the step


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
""",
    ),
    Kind(
        code="GS-O003",
        title="clipping reads the gradient norm or its threshold on the host",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="error_if_nonfinite=True asks whether the norm is finite before it goes on, and torch makes a number of a "
        "threshold in a tensor: the host waits, which CUDA refuses in a capture.",
        fix="leave error_if_nonfinite out, and look at the returned norm after the step; give a threshold in a tensor "
        "to graphstep.clip_grad_norm_",
        broken="""
def step(x):
    layer(x).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
    return nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
""",
    ),
    Kind(
        code="GS-O004",
        title="the gradient scaler asks on the host whether to step",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="With an optimizer that does not scale by itself, GradScaler.step reads whether a gradient was infinite.",
        fix="build the optimizer with fused=True, which skips the update on the device; or use bf16 and no scaler",
        broken="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")


def step(x):
    optimizer.zero_grad()
    scaler.scale(layer(x).sum()).backward()
    scaler.step(optimizer)  # here
    scaler.update()
""",
        mended="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cpu")


def step(x):
    optimizer.zero_grad()
    scaler.scale(layer(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    Kind(
        code="GS-O005",
        title="the optimizer reads values on the host",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="Its rule branches on losses or norms in Python (LBFGS searches along a line, for one).",
        fix="step after the captured function, or use an optimizer without such branches",
        broken="""
optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=2)


def step(x):
    def closure():
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # here
""",
        mended="""
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).square().mean().backward()
    optimizer.step()
""",
    ),
)
