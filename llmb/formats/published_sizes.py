"""File sizes of published models: weights.yaml of a recipe.

    published_sizes()["fp4"].sizes()  -> {"model-00001-of-00080.safetensors": 5.0, ...}

Shipped as data: another model is one more file.
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.config.recipe import shipped
from llmb.config.serialization import convert
from llmb.errors import ConfigError
from llmb.formats.yaml_file import load_yaml


@dataclass(frozen=True, kw_only=True)
class PublishedSizes:
    """File sizes of one folder of weights, in GiB, rounded up as by `ls -lh`."""

    name: str
    like: str  # short name
    source: str
    total_gib: int
    file: str  # format string of the shard number
    shards: int
    usual: float
    others: dict[int, float]

    def sizes(self) -> dict[str, float]:
        """Return the size of every shard by file name."""
        return {self.file.format(n): self.others.get(n, self.usual) for n in range(1, self.shards + 1)}


def published_sizes(folder: Path | None = None) -> dict[str, PublishedSizes]:
    """Load the sizes that come with the recipes of a folder, by short name."""
    listings: dict[str, PublishedSizes] = {}
    for path in sorted((folder or shipped()).glob("*/weights.yaml")):
        for listing in convert(tuple[PublishedSizes, ...], load_yaml(path, "published sizes"), str(path)):
            if listing.like in listings:
                raise ConfigError(f"{path}: {listing.like} is listed twice")
            listings[listing.like] = listing
    return listings
