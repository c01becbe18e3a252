"""`python -m flatmtl_bench` is the command `flatmtl`."""

from flatmtl_bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
