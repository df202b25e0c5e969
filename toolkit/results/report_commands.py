"""How to do it again."""

from collections.abc import Iterator, Sequence

from toolkit.results.provenance import begun_anew
from toolkit.results.report_blocks import Block, Command, Text
from toolkit.results.report_format import count
from toolkit.results.run_record import Run


def reproduce_blocks(runs: Sequence[Run]) -> Iterator[Block]:
    """Each command once, with the runs that it made and what they ran on."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        command = run.provenance.get("command")
        if isinstance(command, str):
            found.setdefault((begun_anew(command), _where(run)), []).append(run)
    if not found:
        yield Text("No run tells its command.")
    for (command, where), same in found.items():
        folders = [*dict.fromkeys(str(run.folder) for run in same)]
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        yield Command(command, f"{count(len(same), 'run')} in {folders[0]}{more}; {where}")


def _where(run: Run) -> str:
    found = run.provenance
    versions = found.get("versions")
    told = []
    if commit := found.get("commit"):
        changed = ", with changes" if str(commit).endswith("+") else ""
        told.append(f"commit {str(commit).removesuffix('+')[:10]}{changed}")
    if isinstance(versions, dict):
        known = ("python", "cdp-toolkit", "torch")
        told += [f"{name} {versions[name]}" for name in known if name in versions]
    if device := found.get("device"):
        told.append(str(device))
    return ", ".join(told) or "neither commit, versions nor device are told"
