"""What a block needn't compute again: less work, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from finetune.artifact import record_files
from finetune.quant import memo as module
from finetune.quant.memo import ForwardMemo
from finetune.quant.quantize import quantize_model
from tests.families import CONV1D, EXPERTS, FAMILIES, OWN_LINEAR, tiny_model
from tests.test_quant_model import settings_for


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(EXPERTS)))
def test_every_family_gets_the_same_bytes_without_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(family, tmp_path / "source")
    own = {"format": "gptq"} if family in (*CONV1D, *OWN_LINEAR) else {}
    settings = settings_for(tmp_path, tuning_steps=0, verify=False, **own)
    records = {}
    for max_bytes in (2**30, 0):
        monkeypatch.setattr(module, "MAX_BYTES", max_bytes)
        out = tmp_path / str(max_bytes)
        quantize_model(source, settings=settings, out=out, seed=0)
        records[max_bytes] = {name: file.sha256 for name, file in record_files(out).items() if "safetensors" in name}
    assert records[0] == records[2**30] != {}


class Norm(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 2.0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).relu())


class Block(nn.Module):
    def __init__(self, *, in_place: bool = False, calls: int = 1) -> None:
        super().__init__()
        self.norm, self.part = Norm(), Part()
        self._in_place, self._calls = in_place, calls

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        for _ in range(self._calls - 1):
            normed = self.norm(normed)
        return normed.add_(self.part(normed)) if self._in_place else hidden + self.part(normed)


@pytest.mark.parametrize(
    ("block", "skipped"),
    [(Block(), {"norm", "part.down"}), (Block(in_place=True), {"part.down"}), (Block(calls=2), {"part.down"})],
    ids=["plain", "writes into its norm's output", "a norm that is called twice"],
)
@torch.no_grad()
def test_a_pass_skips_what_it_knows_and_computes_the_same(block: Block, skipped: set[str]) -> None:
    chunks = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    exact = [block(chunk) for chunk in chunks]
    memo = ForwardMemo(block, [["part.up"], ["part.down"]], len(chunks), lambda: block(chunks[0]))
    for layer in ("part.up", "part.down"):
        for position, chunk in enumerate(chunks):
            with memo.skipping(position, "cpu"):
                caught: list[Tensor] = []
                hook = block.get_submodule(layer).register_forward_pre_hook(
                    lambda _, args, caught=caught: caught.append(args[0])
                )
                assert torch.equal(block(chunk), exact[position])
                hook.remove()
            memo.keep(layer, position, caught[0])
    for _ in range(2):
        for position, chunk in enumerate(chunks):
            with memo.skipping(position, "cpu"):
                assert ("forward" in vars(block.norm)) == ("norm" in skipped)
                assert "forward" in vars(block.part)
                assert torch.equal(block(chunk), exact[position])
    assert "forward" not in vars(block.norm)
    assert "forward" not in vars(block.part)
