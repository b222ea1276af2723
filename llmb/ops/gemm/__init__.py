"""Matrix multiplication: cuBLASLt, block-scaled fp8, skinny GEMM for decoding."""
