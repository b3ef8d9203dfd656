"""Choosing tokens from logits. sampler (one call per step), row (what it keeps per request), processors
(everything that changes logits before temperature), sampling (argmax, cuts and the draw), draws (random
numbers), logprobs.

Order within a row: grammar mask, allowed ids, bans (bad words, min_tokens), logit bias, repetition, frequency
and presence penalty, then argmax; or temperature, min_p, top_k, top_p and a draw. Reported
log-probabilities are those of the logits before all of this.
"""
