"""Parts of benchmarks/gateway_overhead.py."""
