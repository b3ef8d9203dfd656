"""What long prompts do to everybody else, with and without fairness: the parts of benchmarks/fairness.py."""
