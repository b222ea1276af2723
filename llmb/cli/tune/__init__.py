"""llmb-run tune: options, the search for training and serving, measurement of the best."""
