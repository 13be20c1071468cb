"""Quantizers of other projects, each run in a process of its own and measured by one evaluator."""
