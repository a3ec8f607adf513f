"""Compiles the Hopper matmul, which needs no GPU, and looks at what became of it; run as a script.

Gluon cannot compile in a process in which the interpreter has patched ``triton.language``.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels import stream_linear_gpu
from outrider.kernels.stream_config import StreamConfig, shared_bytes


def compile_one(block_m: int, config: StreamConfig, pair: int) -> None:
    kernel = stream_linear_gpu._stream
    shapes = {"x": [block_m, config.block_k], "weight": [64, config.block_k]}
    signature = dict.fromkeys(kernel.arg_names, "i32")
    for name, shape in shapes.items():
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
        signature[name] = f"tensordesc<bf16[{shape[0]}, {shape[1]}],{layout!r}>"
    signature |= {"out": "*bf16", "partial": "*fp32", "arrived": "*i32"}
    split = config.split > 1
    constants: dict[str, object] = {} if split else {"partial": None, "arrived": None}
    constants |= {
        "bias": None, "residual": None, "BLOCK_M": block_m, "TILES": config.tiles,
        "BLOCK_K": config.block_k, "STAGES": config.stages, "PAIR": pair, "PDL": True,
        "WARPS": config.warps, "SPLIT": split,
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constants)
    options = {"num_warps": config.warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= shared_bytes(config, block_m, pair > 0)
    # The weight's first loads come before the wait for the kernel ahead.
    text = compiled.asm["ptx"]
    ahead = text[: text.index("griddepcontrol.wait")]
    assert ahead.count("cp.async.bulk.tensor") == config.stages * config.tiles
    print("_stream", block_m, config, pair)


if __name__ == "__main__":
    compile_one(16, StreamConfig(3, 128, 4), pair=8)
    compile_one(64, StreamConfig(1, 64, 4), pair=0)
    compile_one(64, StreamConfig(2, 64, 4, split=2), pair=0)
