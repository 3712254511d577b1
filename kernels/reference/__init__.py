"""Every operation in plain torch: the specification of the kernels, and what runs where there is none."""

from kernels.reference.activation import swiglu
from kernels.reference.attention import masked_attention, sparse_attention
from kernels.reference.compressor import compress, compress_overlapping
from kernels.reference.dequant import dequant_fp4, dequant_fp8
from kernels.reference.experts import ExpertRows, expert_mlp, expert_sum
from kernels.reference.fp4 import fp4_simulate, hadamard, hadamard_fp4
from kernels.reference.fp8 import act_quant, act_round, fp8_simulate
from kernels.reference.gemm import fp4_gemm, fp4_linear, fp4_linears, fp8_gemm
from kernels.reference.hyper_connection import hc_head_weights, hc_mixes, hc_post, hc_pre, hc_split_sinkhorn
from kernels.reference.indexer import index_scores, index_topk
from kernels.reference.linear import float_linear, fp8_linear, prepare_fp8
from kernels.reference.norm import head_norm, rms_norm
from kernels.reference.rotary import rope, rope_frequencies, rope_table, yarn_frequencies
from kernels.reference.router import route_by_hash, route_by_score, router_scores, topk_weights

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
