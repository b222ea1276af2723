"""AdamW's numbers as language models are pretrained with it, the same for every engine that trains."""

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1  # of matrices; norms have none
