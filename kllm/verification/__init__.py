"""The quality gate: what features and number formats change about a model's answers, measured and judged.

variants     what is compared with the plain path, and how much each may differ: the one table of limits
workload     how much is measured; texts, needles and structured: what is measured
measurement  one engine's answers         judgement  two engines' answers compared
gate         runs it all, variant by variant         report  for people (table, plot) and programs (JSON)
"""
