"""Parts of benchmarks/tiers.py."""
