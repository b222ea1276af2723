"""TTFT, TPOT and throughput of a serving engine, predicted from first principles with few constants."""
