"""The plan of ``finetune.planning`` as lines for a terminal."""

from __future__ import annotations

from typing import Any

from finetune.engine.memory_advice import MARGIN
from finetune.engine.memory_parts import MOMENTS


def format_plan(plan: dict[str, Any]) -> str:
    ranks = f"{plan['world_size']} rank{'s' if plan['world_size'] > 1 else ''} on {plan['device']}"
    if plan["world_size"] > plan["ranks_per_machine"]:
        ranks += f", {plan['ranks_per_machine']} a machine"
    lines = [f"{plan['recipe']}: {ranks}, in {plan['run_dir']}"]
    lines += [f"  {note}" for note in plan["assumed"]]
    lines.append("")
    width = max(len(stage["name"]) for stage in plan["stages"])
    for index, stage in enumerate(plan["stages"], start=1):
        kind = "" if stage["kind"] == stage["name"] else f"{stage['kind']} "
        source = ", ".join(stage["models"]) or "scratch"
        lines.append(f"  {index:2d}  {stage['name']:<{width}}  {stage['state']:<10}  {kind}from {source}")
        lines += [f"      {'':<{width}}  {difference}" for difference in stage["differences"]]
    for stage in plan["stages"]:
        if "parts" in stage:
            lines += ["", f"{stage['name']}:", *(f"  {line}" for line in training_lines(stage))]
    return "\n".join(lines)


def training_lines(stage: dict[str, Any]) -> list[str]:
    lines = [
        f"memory of a rank: {stage['num_parameters'] / 1e6:,.1f}M parameters, "
        f"{stage['engine']} ({stage['engine_reason']})",
        *stage["notes"],
    ]
    for part in stage["parts"]:
        lines.append(_row(part["name"], part["num_bytes"], part["place"], part["note"]))
    for place in ("device", "host", "nvme"):
        peak, limit = stage[f"{place}_bytes_per_rank"], stage.get(f"{place}_limit_bytes_per_rank")
        if not peak:
            continue
        when = "" if place == "nvme" else _moment(stage["peak_moments"][place])
        of = f"of {size(limit)}" if limit is not None else ""
        lines.append(_row("peak", peak, place, ", ".join(part for part in (of, when) if part)))
    lines += [_verdict(stage), *_advice(stage)]
    lines.append(
        f"disk of the stage: {size(stage['disk_bytes'])} = {stage['num_checkpoints']} checkpoints x "
        f"{size(stage['checkpoint_bytes'])} + model {size(stage['model_bytes'])}"
    )
    return lines


def _row(name: str, num_bytes: int, place: str, note: str) -> str:
    return f"  {name:<20} {size(num_bytes):>11}  {place:<6}  {note}".rstrip()


def _moment(moment: str) -> str:
    assert moment in MOMENTS, moment
    return {
        "loss": "as the loss is taken",
        "backward starts": "as the backward starts",
        "backward ends": "as the backward ends",
        "step": "in the optimizer's step",
    }[moment]


def _verdict(stage: dict[str, Any]) -> str:
    spare = f"with {MARGIN:.0%} to spare"
    if stage["fits"]:
        return f"fits, {spare}"
    if stage["fits"] is False:
        return f"does NOT fit {spare}"
    if stage["device_bytes_per_rank"] and stage["device_limit_bytes_per_rank"] is None:
        return "whether it fits isn't known: give --gpu-memory (and --cpu-memory)"
    return "fits the device; whether the host suffices isn't known: give --cpu-memory"


def _advice(stage: dict[str, Any]) -> list[str]:
    if stage["fits"] is not False:
        return []
    if not stage["changes"]:
        if stage["closest"] is None:
            return ["nothing would make it fit"]
        return ["nothing would make it fit; the closest:", *_table([stage["closest"]])]
    return ["what would make it fit, the least loss of speed first:", *_table(stage["changes"])]


def _table(changes: list[dict[str, Any]]) -> list[str]:
    texts = [", ".join(f"{name}: {_value(value)}" for name, value in change["settings"].items()) for change in changes]
    width = max(len(text) for text in texts)
    lines = []
    for number, (text, change) in enumerate(zip(texts, changes, strict=True), start=1):
        peaks = [
            f"{place} {size(change[f'{place}_bytes_per_rank'])}"
            for place in ("device", "host", "nvme")
            if change[f"{place}_bytes_per_rank"]
        ]
        lines.append(f"  {number}. {text:<{width}}  {', '.join(peaks)}")
    return lines


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
