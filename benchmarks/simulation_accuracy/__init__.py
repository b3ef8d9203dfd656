"""How well a simulated instance predicts the real one on this machine: see docs/simulation-accuracy.md."""
