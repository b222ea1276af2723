"""llmb-run sweep: options, drivers of single points, the loop over them."""
