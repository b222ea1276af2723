"""Speculative decoding: a draft model proposes tokens, the served model verifies them in one step."""
