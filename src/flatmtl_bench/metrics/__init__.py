"""What a task's output is trained by and judged by."""

from flatmtl_bench.metrics.classification import Classification

__all__ = ["Classification"]
