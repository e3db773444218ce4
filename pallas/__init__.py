"""Kernels on the base experts for accelerators. reference.py defines them."""
