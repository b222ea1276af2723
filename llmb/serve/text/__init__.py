"""Text of a served model: tokenizer, incremental detokenization, stop strings, chat template."""
