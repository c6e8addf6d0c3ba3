"""What the benchmarks share: cases, arms, clocks, device time, checks against eager, environment, output."""
