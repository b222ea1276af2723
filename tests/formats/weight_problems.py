"""Findings of `llmb-install verify` on a folder of weights."""

from llmb.cli.install.llmb_install import main
from llmb.formats.weight_folder import FolderReport

SHARD = "model-00002-of-00003.safetensors"  # one of the small folder


def problems_of(report: FolderReport) -> list[tuple[str, str]]:
    return [(problem.kind, problem.file) for problem in report.problems]


def verify(capsys, *arguments: object) -> tuple[int, list[str]]:
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()
