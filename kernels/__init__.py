"""The model's operations. Tensors in, tensors out; imports nothing else of this project.

`kernels.reference` is the specification in plain torch and what a CPU runs. A kernel for a GPU has the same name and
signature in a module of the same name beside it; `by_device` chooses by where the first tensor lies. No module here has
the name of an operation: importing it would put the module in the operation's place.
"""

from kernels import reference
from kernels.dispatch import by_device
from kernels.reference import (
    ExpertRows,
    dequant_fp4,
    dequant_fp8,
    fp4_linear,
    fp4_linears,
    hadamard,
    hc_head_weights,
    masked_attention,
    rope_frequencies,
    rope_table,
    route_by_hash,
    topk_weights,
    yarn_frequencies,
)

act_quant = by_device(reference.act_quant, "fp8")
act_round = by_device(reference.act_round, "fp8")
compress = by_device(reference.compress, "compressor")
compress_overlapping = by_device(reference.compress_overlapping, "compressor")
expert_mlp = by_device(reference.expert_mlp, "experts")
expert_sum = by_device(reference.expert_sum, "experts")
float_linear = by_device(reference.float_linear, "gemm")
fp4_gemm = by_device(reference.fp4_gemm, "gemm")
fp4_simulate = by_device(reference.fp4_simulate, "fp4")
fp8_gemm = by_device(reference.fp8_gemm, "gemm")
fp8_linear = by_device(reference.fp8_linear, "gemm")
fp8_simulate = by_device(reference.fp8_simulate, "fp8")
hadamard_fp4 = by_device(reference.hadamard_fp4, "fp4")
hc_mixes = by_device(reference.hc_mixes, "hyper_connection")
hc_post = by_device(reference.hc_post, "hyper_connection")
hc_pre = by_device(reference.hc_pre, "hyper_connection")
hc_split_sinkhorn = by_device(reference.hc_split_sinkhorn, "hyper_connection")
head_norm = by_device(reference.head_norm, "norm")
index_scores = by_device(reference.index_scores, "indexer")
index_topk = by_device(reference.index_topk, "indexer")
prepare_fp8 = by_device(reference.prepare_fp8, "gemm")
rms_norm = by_device(reference.rms_norm, "norm")
rope = by_device(reference.rope, "rotary")
route_by_score = by_device(reference.route_by_score, "router")
router_scores = by_device(reference.router_scores, "router")
sparse_attention = by_device(reference.sparse_attention, "attention")
swiglu = by_device(reference.swiglu, "activation")

__all__ = [
    "ExpertRows",
    "act_quant",
    "act_round",
    "compress",
    "compress_overlapping",
    "dequant_fp4",
    "dequant_fp8",
    "expert_mlp",
    "expert_sum",
    "float_linear",
    "fp4_gemm",
    "fp4_linear",
    "fp4_linears",
    "fp4_simulate",
    "fp8_gemm",
    "fp8_linear",
    "fp8_simulate",
    "hadamard",
    "hadamard_fp4",
    "hc_head_weights",
    "hc_mixes",
    "hc_post",
    "hc_pre",
    "hc_split_sinkhorn",
    "head_norm",
    "index_scores",
    "index_topk",
    "masked_attention",
    "prepare_fp8",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_table",
    "route_by_hash",
    "route_by_score",
    "router_scores",
    "sparse_attention",
    "swiglu",
    "topk_weights",
    "yarn_frequencies",
]
