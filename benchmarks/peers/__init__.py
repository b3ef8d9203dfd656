"""kLLM beside other engines on one machine: the same prompts, one run, medians.

    make bench-peers                                     everything: install, convert, measure, table, plot, JSON
    python -m benchmarks.peers --engines peers           only the others; results are kept
    python -m benchmarks.peers --engines 'kllm-*'        only ours, merged into the kept results
    python -m benchmarks.peers --engines 'kllm-*,vllm-bf16' --figures batch,shared --repeat 5

Every peer lives in a virtual environment of its own under ~/.cache/kllm/peers (`--cache`), pinned by the files in
requirements/. A measurement is a *visit*: a fresh process of one engine that starts, answers its first prompt (cold
start), warms up, takes every figure and ends. Visits of the engines alternate, `--repeat` times, each round starting
with another engine, so that a noisy machine disturbs all of them alike and only one engine is alive at a time.

What is measured, all greedy and with every core (see workload.py for the sizes):

    ttft_512_ms, ttft_4096_ms      time of one output token for a prompt of that length
    decode_tokens_per_s            one stream: 127 tokens over (time of 128 tokens - time of 1 token)
    batch_*_tokens_per_s           32 prompts of 512 tokens at once, 128 output tokens each
    shared_output_tokens_per_s     the same with a common prefix of 384 tokens
    cold_start_s                   process start to the first token of a 512-token prompt, caches on disk warm
    peak_rss_mb                    most memory of the visit: proportional set sizes of its processes, summed (MiB)
"""
