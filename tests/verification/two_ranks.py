"""One rank of a job of two: verifies models in DistributedDataParallel, and prints what it has found, a line each.

python two_ranks.py RANK FILE FAULT..., where each fault is planted on the second rank only.
"""

from __future__ import annotations

import json
import sys

import torch
from tests.verification import faulty
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import graphstep


def main(rank: int, file: str, faults: list[str]) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for fault in faults:
        torch.manual_seed(0)
        model = faulty.Model(getattr(faulty, fault if rank == 1 else "Plain")())
        wrapped = DistributedDataParallel(model)
        torch.manual_seed(rank)
        batches = [torch.randn(4, faulty.WIDTH) for _ in range(3)]
        regions = {f"module.{pattern}": kind for pattern, kind in faulty.REGIONS.items()}
        with graphstep.attach(wrapped, regions=regions) as manager:
            report = graphstep.verify(manager, batches)
        first = None if report.first is None else [report.first.module, str(report.first.part)]
        print(json.dumps([report.equal, report.num_steps, report.num_replays, first, list(report.notes)]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
