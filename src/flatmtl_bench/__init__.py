"""Benchmark harness of flatmtl: data, models, metrics, recipes, trainer, reports and the command line."""
