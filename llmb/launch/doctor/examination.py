"""Doctor of one machine: its facts and findings, which travel between nodes as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmb.launch.doctor.finding import Finding
from llmb.launch.doctor.gpu_findings import gpu_findings
from llmb.launch.doctor.host_findings import host_findings
from llmb.launch.doctor.machine_facts import MachineFacts, machine_facts


@dataclass(frozen=True, kw_only=True)
class Examination:
    """One machine."""

    host: str
    findings: tuple[Finding, ...]
    facts: MachineFacts


def examine(environ: Mapping[str, str]) -> Examination:
    """Look at this machine."""
    return judge(machine_facts(environ))


def judge(facts: MachineFacts) -> Examination:
    """Return the findings of given facts."""
    return Examination(host=facts.host.name, findings=(*gpu_findings(facts), *host_findings(facts)), facts=facts)
