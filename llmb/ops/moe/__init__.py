"""Mixture of experts: routing, permutation, grouped GEMM."""
