"""Parts of benchmarks/pools.py."""
