"""`python -m kllm.cli` is `kllm`."""

from kllm.cli.app import main

main()
