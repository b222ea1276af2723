"""llmb-run compare, gate, ab and exemplar: is a run faster, slower, or good enough?"""
