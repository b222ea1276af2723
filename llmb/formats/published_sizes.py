"""How large the files of a published model are, as its document prints them: weights.yaml beside a recipe.

    listings()["fp4"].sizes()  -> {"model-00001-of-00080.safetensors": 5.0, ...}

Shipped as data, so that another model's list is one more file.
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.config.recipe import load_yaml, shipped
from llmb.config.serialization import convert
from llmb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One folder of weights. Sizes are in GiB, rounded up as `ls -lh` does."""

    name: str
    like: str  # what it is called for short
    source: str
    total_gib: int
    file: str  # with a place for the number of the shard
    shards: int
    usual: float
    others: dict[int, float]

    def sizes(self) -> dict[str, float]:
        """Of every shard by its file name."""
        return {self.file.format(n): self.others.get(n, self.usual) for n in range(1, self.shards + 1)}


def listings(folder: Path | None = None) -> dict[str, Listing]:
    """Every listing that comes with the recipes of a folder, by its short name."""
    found: dict[str, Listing] = {}
    for path in sorted((folder or shipped()).glob("*/weights.yaml")):
        for listing in convert(tuple[Listing, ...], load_yaml(path), str(path)):
            if listing.like in found:
                raise ConfigError(f"{path}: {listing.like} is listed twice")
            found[listing.like] = listing
    return found
