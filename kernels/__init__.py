"""The model's operations. Tensors in, tensors out; imports nothing else of this project.

`kernels.reference` is the specification in plain torch and what a CPU runs. A kernel for a GPU has the same name and
signature in a module of the same name beside it; `by_device` chooses by where the first tensor lies.
"""

from kernels.dispatch import by_device
from kernels.reference.act_quant import act_quant, act_round, fp8_simulate
from kernels.reference.attention import masked_attention, sparse_attention
from kernels.reference.compressor import compress, compress_overlapping
from kernels.reference.dequant import dequant_fp4, dequant_fp8
from kernels.reference.fp4_simulate import fp4_simulate
from kernels.reference.gemm import fp4_gemm, fp4_linear, fp4_linears, fp8_gemm
from kernels.reference.hadamard import hadamard
from kernels.reference.hyper_connection import hc_head_weights, hc_mixes, hc_post, hc_pre, hc_split_sinkhorn
from kernels.reference.indexer import index_scores, index_topk
from kernels.reference.linear import fp8_linear, prepare_fp8
from kernels.reference.rms_norm import head_norm
from kernels.reference.rms_norm import rms_norm as _rms_norm
from kernels.reference.rope import rope, rope_frequencies, rope_table, yarn_frequencies
from kernels.reference.router import route_by_hash, route_by_score, router_scores, topk_weights
from kernels.reference.swiglu import swiglu

rms_norm = by_device(_rms_norm, "rms_norm")

__all__ = [
    "act_quant",
    "act_round",
    "compress",
    "compress_overlapping",
    "dequant_fp4",
    "dequant_fp8",
    "fp4_gemm",
    "fp4_linear",
    "fp4_linears",
    "fp4_simulate",
    "fp8_gemm",
    "fp8_linear",
    "fp8_simulate",
    "hadamard",
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
