"""What a program's digest depends on, and what it does not."""

from __future__ import annotations

import pytest

from tpu_contract.protocol import ProgramMatch
from tpu_trainer.gang.program_digest import compare, digest_of

PROGRAM = """module @IrToHlo.12 attributes {mhlo.is_dynamic = false} {
  func.func @main(%a: tensor<4x8xf32>, %arg1: tensor<8xf32>) -> (tensor<4x8xf32>, tensor<f32>) {
    %cst = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.dot_general %a, %0, over = [1] x [0] : (tensor<4x8xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %2 = stablehlo.maximum %1, %1 : tensor<4x4xf32>
    %3 = "stablehlo.all_reduce"(%2) <{replica_groups = dense<> : tensor<0x0xi64>}> ({
    ^bb0(%arg9: tensor<f32>, %arg10: tensor<f32>):
      %9 = stablehlo.add %arg9, %arg10 : tensor<f32>
      stablehlo.return %9 : tensor<f32>
    }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
    return %a, %cst : tensor<4x8xf32>, tensor<f32>
  }
}
"""
LAYOUT = """dims = [1, 0] {result_layout = dense<[0, 1]> : tensor<2xindex>, xla_shape = "f32[8,4]{0,1}"} :"""


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("IrToHlo.12", "IrToHlo.9001", ProgramMatch.SAME),
        ("dims = [1, 0] :", LAYOUT, ProgramMatch.SAME),
        ("dims = [1, 0] :", LAYOUT.replace("0, 1", "1, 0"), ProgramMatch.SAME),
        ("stablehlo.maximum", "stablehlo.minimum", ProgramMatch.ALIKE),
        ("dense<0.0>", "dense<1.0>", ProgramMatch.ALIKE),
        ("%1 = ", "%7 = ", ProgramMatch.ALIKE),
        ("%arg1: tensor<8xf32>", "%arg1: tensor<8xbf16>", ProgramMatch.OTHER),
        ("%arg1: tensor<8xf32>", "%arg1: tensor<8xf32>, %arg2: tensor<8xf32>", ProgramMatch.OTHER),
        ("(tensor<4x8xf32>, tensor<f32>)", "(tensor<4x8xf32>)", ProgramMatch.OTHER),
        ("over = [1] x [0]", "over = [0] x [1]", ProgramMatch.OTHER),
        (
            "    }) : (tensor<4x4xf32>) -> tensor<4x4xf32>",
            "    }) : (tensor<16xf32>) -> tensor<16xf32>",
            ProgramMatch.OTHER,
        ),
    ],
)
def test_a_digest_covers_what_is_compiled(before: str, after: str, match: ProgramMatch) -> None:
    assert PROGRAM.count(before) == 1
    assert compare(digest_of(PROGRAM.replace(before, after)), digest_of(PROGRAM)) is match
